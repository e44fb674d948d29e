"""What work will take is forecast from the sizes of the work and the speed of the device that is meant."""

from linearizer.jobs.forecast import matrix_size


def test_every_gpu_is_timed_as_a_gpu():
    assert matrix_size("cuda:1") == matrix_size("cuda") > matrix_size("cpu")
