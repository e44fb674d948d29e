"""What keeps libraries quiet in one thread neither wakes them for another nor leaves them quiet for ever."""

from transformers.utils import logging

from linearizer.progress import quiet


def test_libraries_print_again_once_the_last_thread_is_done_in_whatever_order_they_end():
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    first, second = quiet(), quiet()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # the second still works
    assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
    second.__exit__(None, None, None)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before != (logging.ERROR, False)
