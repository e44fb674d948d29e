"""What the tests of kernels share: where they run, texts and maps to run on, and mutants.

Without a GPU they run in Triton's interpreter, which checks what they compute.
"""

import functools
import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch

from linearizer.kernels.c.compiler import find_compiler
from linearizer.method.untrained import draw as draw_map
from linearizer.student.feature_maps import FEATURE_MAPS


def let_interpreter_prepare_once():
    """Let Triton's interpreter do once what it does at every operation, which is most of its time.

    At every call of a function it exchanges the language's functions for a module, and never puts back what it
    exchanged for a function that a kernel calls. Tables of types and sizes are written again whenever they are read.
    Each sum of integers is computed again in 64 bits to find overflows, which the results would show as well.
    """
    from triton.language import core, semantic
    from triton.runtime import interpreter

    prepared = set()

    def call(function, *args, **kwargs):
        if function.fn.__module__ not in prepared:
            prepared.add(function.fn.__module__)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    find, found = interpreter._get_np_dtype, {}

    def find_once(kind):
        name = kind.scalar.name
        return found[name] if name in found else found.setdefault(name, find(kind))

    interpreter._get_np_dtype = find_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    broadcast = semantic.TritonSemantic.broadcast_impl_value

    @functools.cache
    def sizes_of(shape):
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def make_tensor(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = sizes_of(tuple(kind.shape) if kind.is_block() else ())

    def broadcast_if_unlike(self, a, b):
        alike = a.type.is_block() and b.type.is_block() and a.type.shape.values == b.type.shape.values
        return (a, b) if alike else broadcast(self, a, b)

    core.tensor.__init__ = make_tensor
    semantic.TritonSemantic.broadcast_impl_value = broadcast_if_unlike


ON_GPU = torch.cuda.is_available()
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")
if not ON_GPU:
    let_interpreter_prepare_once()
DEVICE, EXACT = ("cuda", torch.float32) if ON_GPU else ("cpu", torch.float64)
CLOSE = 1e-4 if ON_GPU else 1e-9


def make(tokens, features=20, group=2, dim=6, value_dim=5, batch=2, heads=2, kind="prf", dtype=EXACT):
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    q, k = draw(batch, heads, group, tokens, dim), draw(batch, heads, tokens, dim)
    feature_map = None
    if features:
        feature_map = FEATURE_MAPS[kind](heads, dim, features).eval().to(DEVICE, dtype)
        draw_map(feature_map, generator)
    return q, k, draw(batch, heads, tokens, value_dim), feature_map


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


def mutate(module, line, mutation, folder, monkeypatch):
    """Exchange a text that a module has once, for every module that uses it."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert source.count(line) == 1, f"{module.__name__} has {source.count(line)} times {line!r}"
    path = folder / "mutant.py"
    path.write_text(source.replace(line, mutation), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, mutant)  # where dataclasses look for their module
    spec.loader.exec_module(mutant)
    if hasattr(module, "SEGMENT"):
        mutant.SEGMENT = module.SEGMENT
    made = {id(vars(module)[n]): x for n, x in vars(mutant).items() if not n.startswith("__") and callable(x)}
    for user in [user for name, user in sys.modules.items() if name.startswith("linearizer.")]:
        for name, x in list(vars(user).items()):
            if id(x) in made:
                monkeypatch.setattr(user, name, made[id(x)])
