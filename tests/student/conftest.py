"""Shared by the tests of what runs in a checkpoint."""

import pytest

from linearizer.student.kernel_in_c import load_kernel


@pytest.fixture
def uncompiled():
    """Forget which kernels there are, before and after."""
    load_kernel.cache_clear()
    yield
    load_kernel.cache_clear()
