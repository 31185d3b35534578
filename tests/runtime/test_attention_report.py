from dataclasses import replace

import pytest

from multimodal_gen.runtime.attention_report import AttentionReport, Footnotes, grouped
from multimodal_gen.runtime.layers.attention.report import LayerReport, ReportEntry, ranges
from multimodal_gen.runtime.layers.attention.request import AttentionRole
from multimodal_gen.runtime.layers.attention.scope import BackendPreference, Source
from multimodal_gen.runtime.layers.attention.selector import Rejected, Selection, condensed
from multimodal_gen.runtime.platforms import AttentionBackendEnum

SDPA = AttentionBackendEnum.TORCH_SDPA
FA = AttentionBackendEnum.FA
NO_FA = Rejected(backend=FA, reasons=("fa2: needs a GPU", "fa3: needs a GPU", "fa3: needs more"))
AUTO = Selection(
    backend=SDPA, variant="torch_sdpa", asked=BackendPreference(source=Source.AUTO), reason="first"
)
FALLBACK = Selection(
    backend=SDPA,
    variant="torch_sdpa",
    asked=BackendPreference(source=Source.SETTINGS, backend=FA, detail="rule 1"),
    reason="fa cannot serve this layer: much text",
    rejected=(NO_FA,),
    fallback=True,
)


def _layer(number, *entries, component="transformer", detours=()):
    return LayerReport(
        component=component,
        name=f"blocks.{number}",
        role=AttentionRole.SELF,
        layer=number,
        entries=tuple(ReportEntry(steps=s, selection=x, calls=c) for s, x, c in entries),
        detours=tuple(ReportEntry(steps=s, selection=x, calls=c) for s, x, c in detours),
    )


def test_layers_that_run_alike_share_a_group() -> None:
    report = AttentionReport(
        layers=(
            _layer(0, (None, AUTO, 4)),
            _layer(1, (None, FALLBACK, 4)),
            _layer(2, (None, AUTO, 4)),
            _layer(3, (None, AUTO, 4)),
            _layer(0, (None, AUTO, 4), component="text_encoder"),
        )
    )
    found = [(g.component, g.layers_text, len(g.members), g.steps) for g in grouped(report)]
    assert found == [
        ("transformer", "0,2-3", 3, "all"),
        ("transformer", "1", 1, "all"),
        ("text_encoder", "0", 1, "all"),
    ]


def test_a_schedule_gives_a_group_per_step_range() -> None:
    report = AttentionReport(layers=(_layer(0, ("0-3", FALLBACK, 8), (None, AUTO, 1)),))
    assert [(g.steps, g.source) for g in grouped(report)] == [
        ("0-3", "settings (rule 1)"),
        ("other", "auto"),
    ]


def test_entries_that_forcing_added_are_of_all_steps() -> None:
    report = AttentionReport(layers=(_layer(0, (None, FALLBACK, 8), (None, AUTO, 1)),))
    assert [g.steps for g in grouped(report)] == ["all", "all"]


def test_a_summary_has_a_line_per_group_and_each_rejection_once() -> None:
    report = AttentionReport(
        layers=(
            _layer(0, ("0-3", FALLBACK, 8), (None, AUTO, 1)),
            _layer(0, (None, FALLBACK, 2), component="text_encoder", detours=[(None, AUTO, 1)]),
        ),
        notes=("vae left alone",),
    )
    assert report.summary().splitlines() == [
        "transformer.self, layers 0, steps 0-3: torch_sdpa [settings (rule 1)], 8 calls each; "
        "fallback, because fa cannot serve this layer [1]",
        "transformer.self, layers 0, steps other: torch_sdpa [auto], 1 call each; first",
        "text_encoder.self, layers 0: torch_sdpa [settings (rule 1)], 2 calls each; as line 1",
        "text_encoder.self, layers 0: detour to torch_sdpa [auto], 1 call each; first",
        "note: vae left alone",
        "[1] fa rejected: fa2, fa3: needs a GPU; fa3: needs more",
    ]


def test_json_of_a_group_keeps_every_reason() -> None:
    (group,) = grouped(AttentionReport(layers=(_layer(5, (None, FALLBACK, 8)),)))
    data = group.as_dict()
    assert (data["layers"], data["count"], data["calls"]) == ([5], 1, 8)
    assert data["rejected"] == [{"backend": "fa", "reasons": list(NO_FA.reasons)}]


def test_an_automatic_choice_keeps_its_reason_beside_the_footnote() -> None:
    footnotes = Footnotes()
    chosen = Selection(
        backend=SDPA,
        variant="torch_sdpa",
        asked=BackendPreference(source=Source.AUTO),
        reason="first",
        rejected=(NO_FA,),
    )
    assert footnotes.reason(chosen) == "first [1]"
    assert len(footnotes.lines()) == 1


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 1, 3], "0-1,3,5"), ([38, 0], "0,38")],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_reasons_without_variants_stay_as_they_are() -> None:
    assert condensed(("needs a: b", "is not here")) == ["needs a: b", "is not here"]


def _sparse(number: int, *densities: float, first: int = 0) -> LayerReport:
    entry = ReportEntry(
        steps=None, selection=AUTO, calls=1, densities=tuple(enumerate(densities, first))
    )
    layer = _layer(number)
    return replace(layer, entries=(entry,))


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((_sparse(0, 0.25, 0.25),), "density 25.0 %"),
        ((_sparse(0, 0.25), _sparse(1, 0.75)), "density 25.0 to 75.0 %"),
        (
            (_sparse(0, 0.3, 0.3, 0.1, 0.1, first=1),),
            "density 20.0 % (steps 1-2: 30.0, 3-4: 10.0)",
        ),
        (
            (_sparse(0, 1.0, 0.2), _sparse(1, 1.0, 0.4)),
            "density 60.0 to 70.0 % (steps 0: 100.0, 1: 30.0)",
        ),
        (
            (_sparse(0, *(i / 100 for i in range(1, 17))),),
            "density 8.5 % (steps 0-1: 1.0 to 2.0, 2-3: 3.0 to 4.0, 4-5: 5.0 to 6.0, 6-7: 7.0 to "
            "8.0, 8-9: 9.0 to 10.0, 10-11: 11.0 to 12.0, 12-13: 13.0 to 14.0, 14-15: 15.0 to 16.0)",
        ),
    ],
)
def test_density_is_told_by_step_where_steps_differ(layers, text) -> None:
    (group,) = grouped(AttentionReport(layers=layers))
    assert group.density_text == text
    assert f" [auto], {text}, 1 call each" in AttentionReport(layers=layers).summary()
