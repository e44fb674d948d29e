"""A stand-in for the package of that name, on ZeroGPU: it lends no GPU, but it does so as that one does.

What is decorated works in a thread of a process that is forked from the server, is used again while it lives, and is
killed when its time is over; what it is given and gives goes through a pipe; what it raises arrives as the name of its
class. Only a visitor's request pays, and STAND_IN_LEFT, a file, says how many seconds are left to pay with. What was
lent is told in STAND_IN_LENT: a line with the process that worked, and the seconds that were asked for.
"""

import inspect
import multiprocessing
import os
import threading
import time
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path

import gradio as gr
from gradio.context import LocalContext

assert os.environ["SPACES_ZERO_GPU"] == "true"
FORK = multiprocessing.get_context("fork")
END = "end"


def GPU(task=None, *, duration=60):  # noqa: N802
    if task is None:
        return partial(GPU, duration=duration)
    idle = []

    @wraps(task)
    def regular(*args, **how):
        return list(asked(task, duration, idle, args, how))[0]

    @wraps(task)
    def generator(*args, **how):
        yield from asked(task, duration, idle, args, how)

    return generator if inspect.isgeneratorfunction(task) else regular


def asked(task, duration, idle, args, how):
    """Have the values of a task from a process that the device was lent to."""
    schedule(duration)
    process, pipe, stop = idle.pop() if idle and idle[-1][0].is_alive() else begun(task)
    end = time.monotonic() + duration
    with Path(os.environ["STAND_IN_LENT"]).open("a") as file:
        file.write(f"{process.pid} {duration}\n")
    pipe.send((args, how))
    while True:
        while not pipe.poll(0.05):
            if time.monotonic() > end:
                process.kill()
        try:
            what, value = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise gr.Error("GPU task aborted", title="ZeroGPU worker error", print_exception=False) from None
        if what == END:
            idle.append((process, pipe, stop))
            return
        if what == "error":
            raise gr.Error(value, title="ZeroGPU worker error", print_exception=False)
        try:
            yield value
        except GeneratorExit:
            stop.set()
            raise


def schedule(seconds):
    """Take the seconds from what the visitor has left, whose request this has to be."""
    left = Path(os.environ["STAND_IN_LEFT"])
    if LocalContext.request.get(None) is None:
        raise gr.Error("Space app has reached its GPU limit", title="ZeroGPU quota exceeded", print_exception=False)
    if (has := int(left.read_text())) < seconds:
        said = f"You have exceeded your free ZeroGPU quota ({seconds}s requested vs. {has}s left). Try again in 1:00:00"
        raise gr.Error(said, title="ZeroGPU quota exceeded", print_exception=False)
    left.write_text(str(has - seconds))


def begun(task):
    """Fork a process that does a task whenever it is asked to."""
    here, there = FORK.Pipe()
    stop = FORK.Event()
    process = FORK.Process(target=serve, args=(task, here, there, stop), daemon=True)
    process.start()
    there.close()
    return process, here, stop


def serve(task, here, pipe, stop):
    here.close()  # so that this ends when the server does
    with suppress(EOFError, BrokenPipeError):
        while True:
            args, how = pipe.recv()
            stop.clear()
            thread = threading.Thread(target=work, args=(task, pipe, stop, args, how))
            thread.start()
            thread.join()
            pipe.send((END, None))


def work(task, pipe, stop, args, how):
    try:
        values = task(*args, **how)
        for value in values if inspect.isgeneratorfunction(task) else [values]:
            pipe.send(("value", value))
            if stop.is_set():
                break
    except BrokenPipeError:  # nobody listens any more
        return
    except Exception as error:  # only the name of its class gets through
        pipe.send(("error", type(error).__name__))


def gradio_auto_wrap(function):
    """Gradio asks for this; the real one does the same unless it is told to lend to every function."""
    return function
