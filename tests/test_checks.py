"""What no work can serve is refused before any work of a run begins."""

from functools import partial

import pytest
from transformers import AutoConfig

from linearizer.checks import check_chain
from linearizer.errors import RequestError
from linearizer.method.blockwise_pass import is_chain
from linearizer.plan.plan import Plan
from tests.support.families import FAMILIES
from tests.support.models import tiny_config
from tests.support.runs import inspection_of

HEALED = Plan("demo", budget=64, steps=4)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_layers_write_is_fitted_where_they_are_a_chain(family):
    check_chain(HEALED, inspection_of([]), partial(is_chain, tiny_config(family)))


def test_what_layers_write_is_not_fitted_where_they_read_more_than_the_layer_before_wrote():
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=4)  # every layer reads the tokens, too
    with pytest.raises(RequestError, match="'demo' are not a chain, .*: ask for --loss logits"):
        check_chain(HEALED, inspection_of([]), partial(is_chain, config))
    for plan in (Plan("demo", budget=64), Plan("demo", budget=64, steps=4, loss="logits")):
        check_chain(plan, inspection_of([]), partial(is_chain, config))
