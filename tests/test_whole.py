"""Whole classes: what a class can do stands in its own body."""
import importlib
import inspect
import pkgutil

import pytest

import stabbook
from stabbook.attention import Attention

NAMES = [m.name for m in pkgutil.walk_packages(stabbook.__path__, "stabbook.")
         if not m.name.endswith("._modidx")]


def plain(member):
    "The function behind a method, property or class method, or None"
    if isinstance(member, property): member = member.fget
    if isinstance(member, (staticmethod, classmethod)): member = member.__func__
    return inspect.unwrap(member) if inspect.isfunction(member) else None


@pytest.mark.parametrize("name", NAMES)
def test_no_method_is_hung_on_a_class_from_outside(name):
    module, foreign = importlib.import_module(name), []
    for kind in vars(module).values():
        if not inspect.isclass(kind) or kind.__module__ != name: continue
        for member, value in vars(kind).items():
            f = plain(value)
            if f is None or f.__module__ != name: continue
            if f.__qualname__.startswith("__create_fn__"): continue  # dataclass's own
            if not f.__qualname__.startswith(kind.__qualname__ + "."):
                foreign.append(f"{kind.__name__}.{member} is {f.__qualname__}")
    assert foreign == []


def test_attention_can_be_read_in_its_own_body():
    source, forward = inspect.getsource(Attention), inspect.getsource(Attention.forward)
    assert "def forward" in source and len(forward.splitlines()) <= 30
