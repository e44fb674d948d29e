"""The endpoint's load, for seconds: whoever stays is answered as alone, whatever the others send."""

import json

from tests.benchmarks.load import main


def test_among_clients_that_leave_or_send_garbage_each_answer_is_that_alone(quick_run, tmp_path):
    words = f"--run {quick_run} --minutes 0.02 --clients 19 --conversations 5 --max-state-bytes {2**23}"
    main([*words.split(), "--out", str(tmp_path / "load.json")])
    found = json.loads((tmp_path / "load.json").read_text())
    answers = found["answers"]
    assert answers["equal to the answer alone"] and answers["conversations"] and answers["hang up"]
    assert not [name for name in answers if name.startswith("other") or ": 5" in name], answers
    assert answers["garbage: 400"] and found["/health asked"] and found["states kept"]
    assert found["MB counted of them"] <= 8
