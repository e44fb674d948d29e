"""What a plan asks of each step, and whether that can be had: known before anything is loaded."""

from __future__ import annotations

from linearizer.allocate.decide import check_dials
from linearizer.errors import RequestError
from linearizer.run.cost import Layer
from linearizer.run.plan import Plan
from linearizer.run.profile import Asked
from linearizer.runtime.feature_maps import FEATURE_MAPS
from linearizer.train.settings import END_TO_END, Settings

DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_plan(plan: Plan, layers: tuple[Layer, ...]) -> None:
    """Refuse before anything is loaded what could not be served after all the work."""
    check_dials(plan, layers)
    asked_of(plan)
    settings_of(plan)
    if plan.feature_map not in FEATURE_MAPS:
        raise RequestError(f"feature map {plan.feature_map!r} is none of {', '.join(FEATURE_MAPS)}")
    if plan.dtype not in DTYPES:
        raise RequestError(f"dtype {plan.dtype!r} is none of {', '.join(DTYPES)}")


def asked_of(plan: Plan) -> Asked:
    """What a plan wants to be measured."""
    return Asked(
        text=plan.text,
        samples=plan.samples,
        sinks=plan.kept_sinks,
        per=plan.per,  # type: ignore[arg-type]
        normalise=plan.normalise,  # type: ignore[arg-type]
        gauge=plan.gauge,  # type: ignore[arg-type]
        seed=plan.seed,
    )


def settings_of(plan: Plan) -> list[Settings]:
    """How a plan wants its student to be trained: one after the other, the steps shared, the first take what is odd."""
    losses = plan.loss.split("+")
    each, odd = divmod(plan.steps, len(losses))
    if plan.steps and not each:
        raise RequestError(
            f"steps {plan.steps} are too few for the losses {plan.loss}, one after the other: give at least "
            f"{len(losses)}, or 0 to train nothing"
        )
    adapted = next((number for number, loss in enumerate(losses) if plan.lora and loss in END_TO_END), len(losses))
    if any(loss != "direct" for loss in losses[adapted + 1 :]):
        raise RequestError(
            f"the losses {plan.loss} hold the student against its teacher once adapters have changed the weights that "
            "both share: let nothing but direct follow the first end to end, or leave out lora"
        )
    return [
        Settings(
            loss=loss,
            steps=each + (number < odd),
            batch=plan.batch,
            seed=plan.seed,
            lora=plan.lora if loss in END_TO_END else 0,
        )
        for number, loss in enumerate(losses)
    ]
