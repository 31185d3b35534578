"""The latent grid of tokens, read off their positions."""

import torch

from multimodal_gen.integrations.models.adapter import Grid, ModelCall


def grid_behind(call: ModelCall, name: str, before: int) -> Grid | None:
    """Return the grid of the tokens behind the first ones; looks at positions once while they live.

    Args:
        call: a call of the model.
        name: the argument with the positions, [S, 3 or more].
        before: number of tokens in front of the grid.
    """
    positions = call.tensor(name)
    if positions is None:
        return None
    return call.once(positions, lambda: raster_grid(positions[before:]))


def raster_grid(positions: torch.Tensor) -> Grid | None:
    """Return the grid of tokens by their positions, None where they do not lie on one, in order.

    Positions may have any distances, equal in all frames, rows and columns.

    Args:
        positions: [S, 3 or more], whose first three numbers are those of frame, row and column.
    """
    points = positions[:, :3].detach().cpu()
    frames, per_frame = _runs(points[:, 0])
    rows, columns = _runs(points[:per_frame, 1])
    if not frames * rows * columns or frames * rows * columns != len(points):
        return None
    lattice = points.reshape(frames, rows, columns, 3)
    axes = (lattice[:, 0, 0, 0], lattice[0, :, 0, 1], lattice[0, 0, :, 2])
    whole = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    rising = all(bool((axis[1:] > axis[:-1]).all()) for axis in axes)
    return (frames, rows, columns) if rising and bool((whole == lattice).all()) else None


def _runs(values: torch.Tensor) -> tuple[int, int]:
    """Return how many runs of equal values there are, and how long one is if all are as long."""
    count = int((values[1:] != values[:-1]).sum()) + min(len(values), 1)
    return count, len(values) // max(count, 1)
