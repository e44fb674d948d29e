"""What a plan asks of each step, and whether that can be had: known before anything is loaded."""

from __future__ import annotations

from linearizer.allocate.decide import check_dials
from linearizer.errors import RequestError
from linearizer.measure.profile import asked_of
from linearizer.run.cost import Layer
from linearizer.run.plan import Plan
from linearizer.runtime.feature_maps import FEATURE_MAPS
from linearizer.train.settings import settings_of

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
