"""Another scheduler for a loaded pipeline, by name and with the model's settings; its noise levels.

Flow-matching models know two families of schedulers that call the same settings by other names:
the shift of their noise levels is `shift` in one and `flow_shift` in the other, and the other needs
to be told that it predicts a flow. diffusers' `from_config` drops the names it does not know, which
would leave the new scheduler at a shift of 1; here they are translated.
"""

import functools
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multimodal_gen.errors import UsageError, nearest, short
from multimodal_gen.runtime.generator.overridden import overridden

_SUFFIX = "Scheduler"
_CARRIED = ("num_train_timesteps", "use_dynamic_shifting", "time_shift_type", "shift_terminal")


def with_scheduler(pipe: Any, name: str) -> Any:
    """Return a scheduler of that name with the settings of the pipeline's own.

    Args:
        pipe: the loaded pipeline.
        name: class of diffusers, in any case, or how its name begins.

    Raises:
        UsageError: diffusers has none, or it cannot stand for the pipeline's own.
    """
    wanted, own = scheduler_class(name), pipe.scheduler
    if wanted is type(own):
        return own
    if _is_flow(own):
        if not _takes_flow(wanted):
            raise _unfit(pipe, wanted, _names_of(_takes_flow))
        return wanted.from_config(_flow_settings(own, wanted))
    fitting = {cls.__name__ for cls in getattr(own, "compatibles", ())}
    if wanted.__name__ not in fitting:
        raise _unfit(pipe, wanted, tuple(sorted(fitting)))
    return wanted.from_config(own.config)


@contextmanager
def given_sigmas(pipe: Any, sigmas: object) -> Iterator[None]:
    """Let the pipeline's scheduler make its steps at these noise levels in the `with` block.

    Args:
        pipe: the pipeline.
        sigmas: the noise levels; None leaves it as it is, and so does a pipeline whose call takes
            them.

    Raises:
        UsageError: its scheduler takes none.
    """
    scheduler = getattr(pipe, "scheduler", None)
    if sigmas is None or "sigmas" in inspect.signature(type(pipe).__call__).parameters:
        yield
        return
    own = getattr(scheduler, "set_timesteps", None)
    if own is None or "sigmas" not in inspect.signature(own).parameters:
        raise UsageError(
            f"--sigmas must be left out for {type(pipe).__name__} with {type(scheduler).__name__}, "
            f"which takes none; choose another --scheduler"
        )

    import numpy as np  # the schedulers of flows do not take lists

    levels = np.array(sigmas)

    @functools.wraps(own)
    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("num_inference_steps", None)
        return own(*args[1:], **{**kwargs, "sigmas": levels})

    with overridden(scheduler, set_timesteps=set_timesteps):
        yield


def scheduler_class(name: str) -> Any:
    """Return the scheduler of diffusers of that name.

    Args:
        name: class of diffusers, in any case, or how its name begins.

    Raises:
        UsageError: there is none of that name.
    """
    import diffusers

    known = {_stem(each): each for each in _names_of(lambda cls: True)}
    stem = _stem(name)
    begin = [each for each in known if each.startswith(stem)] if stem else []
    found = known.get(stem) or (known[begin[0]] if len(begin) == 1 else None)
    if found is None:
        raise UsageError(
            f"--scheduler must be a scheduler of diffusers {diffusers.__version__}, got "
            f"{short(name)}"
            f"{nearest(name, known.values()) or '; e.g. ' + ', '.join(_names_of(_takes_flow))}"
        )
    return getattr(diffusers, found)


def _names_of(fits: Any) -> tuple[str, ...]:
    """Return the names of diffusers' schedulers that fit."""
    import diffusers

    names = [name for name in dir(diffusers) if name.endswith(_SUFFIX) and name != _SUFFIX]
    classes = {name: getattr(diffusers, name) for name in names if not name.startswith("Flax")}
    return tuple(
        name
        for name, cls in classes.items()
        if isinstance(cls, type) and hasattr(cls, "from_config") and fits(cls)
    )


def _stem(name: str) -> str:
    stem = re.sub(r"[^a-z0-9]", "", name.lower())
    return stem.removesuffix(_SUFFIX.lower())


def _settings_of(cls: Any) -> set[str]:
    return set(inspect.signature(cls.__init__).parameters)


def _is_flow(scheduler: Any) -> bool:
    """Tell whether a scheduler is set for a model that predicts a flow."""
    config = scheduler.config
    return "FlowMatch" in type(scheduler).__name__ or bool(config.get("use_flow_sigmas"))


def _takes_flow(cls: Any) -> bool:
    flow_match = "FlowMatch" in cls.__name__ and "shift" in _settings_of(cls)
    other = {"use_flow_sigmas", "flow_shift"} <= _settings_of(cls)
    return flow_match or (other and "Inverse" not in cls.__name__)  # those go from image to noise


def _flow_settings(own: Any, wanted: Any) -> dict[str, Any]:
    """Return the settings of a flow's scheduler in the names of another class."""
    config = dict(own.config)
    shift = config.get("shift", config.get("flow_shift", 1.0))
    taken = _settings_of(wanted)
    lost = [
        key
        for key in ("use_dynamic_shifting", "shift_terminal")
        if config.get(key) and key not in taken
    ]
    if lost:
        raise UsageError(
            f"--scheduler must take {', '.join(lost)}, which this model's scheduler is set to, got "
            f"{wanted.__name__}, which has no such setting; try FlowMatchEulerDiscrete"
        )
    if type(own).__name__.startswith(("UniPC", "DPMSolver", "DEIS", "SASolver")) and (
        "use_flow_sigmas" in taken
    ):
        return {key: value for key, value in config.items() if not key.startswith("_")}
    # Ways to space steps and orders of a solver mean something else in the other family.
    carried = {key: config[key] for key in _CARRIED if key in config and key in taken}
    if "flow_shift" in taken:
        flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        return {**carried, **flow, "flow_shift": shift}
    dynamic = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
    carried |= {key: config[key] for key in dynamic if key in config and key in taken}
    return {**carried, "shift": shift}


def _unfit(pipe: Any, wanted: Any, fitting: tuple[str, ...]) -> UsageError:
    return UsageError(
        f"--scheduler must be one that can stand for the {type(pipe.scheduler).__name__} of this "
        f"{type(pipe).__name__} ({', '.join(fitting) or 'none can'}), got {wanted.__name__}"
    )
