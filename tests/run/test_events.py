"""A log is read in either direction, whatever a kill, a full disk or another program left in it."""

import pytest

from linearizer.run.events import append_event, first_event, newest_events, read_events

NAMES = ["first", "second", "third"]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "events.jsonl"
    for name in NAMES:
        append_event(path, name, {})
    return path


def names(events):
    return [event["event"] for event in events]


@pytest.mark.parametrize(
    "left",
    [
        b"",
        b'{"time": 1.0, "eve',
        b"\xff\xfe\x00",
        b"null\n",
        b"[1]\n\n",
        b'{"event": 3, "time": 1}\n',
        b'{"event": "x"}\n',
    ],
)
def test_what_is_no_event_is_passed_over(log, left):
    with log.open("ab") as file:
        file.write(left)
    assert names(read_events(log)[0]) == names(reversed(list(newest_events(log)))) == NAMES
    append_event(log, "fourth", {"more": 1})
    assert names(read_events(log)[0]) == names(reversed(list(newest_events(log)))) == [*NAMES, "fourth"]
    assert first_event(log)["event"] == "first"


def test_a_line_that_is_being_written_is_read_when_it_is_whole(log):
    line = b'{"time": 2.0, "event": "fourth"}\n'
    result, place = read_events(log)
    for byte in line[:-1]:
        with log.open("ab") as file:
            file.write(bytes([byte]))
        assert read_events(log, place) == ([], place)
        assert next(newest_events(log)) == result[-1]
    with log.open("ab") as file:
        file.write(line[-1:])
    assert names(read_events(log, place)[0]) == ["fourth"] == names([next(newest_events(log))])
