"""The tables of docs/SCALE.md are those that the command makes."""

from pathlib import Path

import pytest

from benchmarks import plan_accuracy, scale

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/SCALE.md").read_text(encoding="utf-8")
CLOSED = "fast --no-propagate"
NAMES = [(model, recipe) for model in scale.MODELS for recipe in scale.RECIPES]


def tabled(model, recipe):
    first, last = scale.between(f"{model}, {recipe}")
    assert f"{first}\n{scale.table(model, recipe)}\n{last}" in DOCUMENT


def test_the_document_has_the_table_that_is_made():
    tabled("Llama-3-70B", CLOSED)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "recipe"), NAMES)
def test_the_document_has_every_table(model, recipe):
    tabled(model, recipe)


def test_more_gpus_divide_tasks_and_nothing_else():
    one, eight = (scale.planned("Llama-3-70B", CLOSED, "h100", n) for n in (1, 8))
    phases = {phase.name: phase for phase in one.forecast.phases}
    solving = phases["solving mlp"]
    assert eight.seconds(solving) == pytest.approx(one.seconds(solving) / 8)
    assert eight.seconds(phases["checking"]) == one.seconds(phases["checking"])
    assert one.adding == 0 < eight.adding
    hundred = scale.planned("Llama-3-70B", CLOSED, "h100", 100)
    assert hundred.seconds(solving) == pytest.approx(one.seconds(solving) / 80)  # of 80 blocks


def test_what_does_not_fit_has_no_total():
    small = scale.planned("Llama-3.1-405B", CLOSED, "rtx4090", 1)
    assert small.total is None
    large = scale.planned("Llama-3-70B", CLOSED, "h100", 1)
    assert large.total == pytest.approx(
        sum(map(large.seconds, large.forecast.phases)) + large.reading
    )


def test_predicted_and_found_are_of_the_same_phases():
    from coec.planning import ComputeConfig, Forecast
    from machines import small_machine

    plan, how = scale.plan_of("Llama-3-70B", CLOSED), None
    how = ComputeConfig.of(plan, scale.torch.device("cpu"))
    forecast = Forecast.of(plan, how, small_machine())
    found = {
        "starting": 7.0, "bytes": 2, "laps": {"checking": 1.0, "calibrating": 4.0, "solving": 3.0},
        "sites": {"attention": [(1.0, 2, 20)], "mlp": [(1.5, 2, 10), (0.5, 3, 20)]},
    }  # fmt: skip
    made = plan_accuracy.compared(forecast, 1, found)
    assert made["found"]["solving mlp"] == 2.0
    assert made["found"]["all"] == 15.0
    assert made["efforts"]["mlp"] == [2.5, 15.0]
    typical = made["predicted"]["calibrating"][0]
    own = forecast.seconds
    parts = ("reading weights", "loading weights", "calibrating")
    assert typical == pytest.approx(sum(own[name].typical for name in parts))
    assert made["predicted"]["all"][0] == pytest.approx(forecast.total.typical)
    assert "| solving mlp |" in plan_accuracy.describe({"run": "x", **made})


def test_between_two_machines_lies_the_mean_of_their_times():
    from machines import small_machine

    one = small_machine()
    other = plan_accuracy.replace(
        one, rates={n: ((1.0, p[0][1] / 3),) for n, p in one.rates.items()}
    )
    both = plan_accuracy.between(one, other)
    assert both.rates["product"][0][1] == pytest.approx(one.rates["product"][0][1] / 2)
