"""An implementation of an operation from outside: found by its path, checked, named in fingerprints."""

import hashlib
import sys

import pytest
import torch

from rlloop.config.numerics import ProfileConfig
from rlloop.config.run import RunConfig
from rlloop.errors import ConfigError
from rlloop.launch.compose import build, compose_recipe
from rlloop.launch.prepare import check_kernels
from rlloop.numerics.implementations import OPERATIONS, outside, source_digest
from rlloop.numerics.ops import Ops
from rlloop.numerics.probe import probe, same_bits
from rlloop.numerics.profile import NumericsProfile

INVARIANT = """
import torch
BATCH_INVARIANT = True
calls = []
def silu_mul(gate, up):
    calls.append(len(gate))
    return torch.nn.functional.silu(gate.double()).to(gate.dtype) * up
"""
VARYING = INVARIANT.replace("* up", "* up + len(gate)")
UNDECLARED = INVARIANT.replace("BATCH_INVARIANT = True", "")


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a package `theirs`; returns its path."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "__init__.py").touch()

    def write(source: str, name: str = "kernels") -> str:
        (tmp_path / "theirs" / f"{name}.py").write_text(source)
        return f"theirs.{name}"

    yield write
    outside.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


def test_its_function_runs_in_place_of_ours_and_the_rest_stays_ours(module):
    profile = NumericsProfile(activation=module(INVARIANT))
    ops, ours = Ops(profile), Ops(NumericsProfile())
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8)
    made = ops.silu_mul(gate, up)
    assert outside("theirs.kernels").calls == [3]
    torch.testing.assert_close(made, ours.silu_mul(gate, up))
    made.sum().backward()
    assert gate.grad is not None
    assert same_bits(ops.sigmoid_mul(gate, up), ours.sigmoid_mul(gate, up))
    with torch.no_grad():
        assert ours.fuses
        assert not ops.fuses  # a kernel of several operations would run ours


def test_a_declared_one_holds_the_contract_and_is_probed(module):
    good, bad = module(INVARIANT), module(VARYING, "varying")
    assert NumericsProfile(activation=good).holds_contract
    assert probe(Ops(NumericsProfile(activation=good)), torch.float32) == {}
    assert list(probe(Ops(NumericsProfile(activation=bad)), torch.float32)) == ["activation"]


@pytest.mark.slow
def test_every_operation_from_outside_is_probed(module):
    """Modules that pass ours on, and ones that add what the batch decides, knob by knob."""
    names = [name for names in OPERATIONS.values() for name in names]
    honest = "BATCH_INVARIANT = True\nfrom rlloop.numerics.operators import " + ", ".join(names)
    path = module(honest)
    profile = NumericsProfile(**dict.fromkeys(OPERATIONS, path))
    assert probe(Ops(profile), torch.float32) == {}
    for knob, names in OPERATIONS.items():
        for name in names:
            if name == "sample":
                continue  # is checked by drawing again, token by token
            path = module(
                "from rlloop.numerics import operators\n"
                f"def {name}(x, *rest, **options):\n"
                f"    made = operators.{name}(x, *rest, **options)\n"
                "    rows = len(x) % 6\n"
                "    return made + rows if hasattr(made, 'shape') else (made[0] + rows, *made[1:])\n",
                f"varying_{name}",
            )
            assert list(probe(Ops(NumericsProfile(**{knob: path})), torch.float32)) == [knob], name


def test_require_asks_for_the_declaration(module):
    def config(path: str, *overrides: str) -> RunConfig:
        built = build(compose_recipe("countdown", [f"model.profile.activation={path}", *overrides]))
        check_kernels(built)
        return built

    assert config(module(INVARIANT)).model.profile.activation == "theirs.kernels"
    path = module(UNDECLARED, "undeclared")
    assert not NumericsProfile(activation=path).holds_contract
    with pytest.raises(ConfigError, match=r"model.profile.activation is theirs.undeclared.*declare BATCH_INVARIANT"):
        config(path)
    config(path, "parity.mode=observe")


def test_fingerprints_name_path_and_source(module, tmp_path):
    path = module(INVARIANT)
    facts = NumericsProfile(activation=path).as_dict()
    assert facts["activation"] == path
    assert list(facts["sources"]) == [path]
    before = facts["sources"][path]
    module(INVARIANT + "# changed\n")
    assert source_digest(path) != before
    whole = source_digest("theirs")
    module("x = 1\n", "another")
    assert source_digest("theirs") != whole
    assert "sources" not in NumericsProfile().as_dict()
    assert len(before) == len(hashlib.sha256().hexdigest())


def test_mistakes_are_named_by_key(module):
    def check(*overrides: str) -> None:
        check_kernels(build(compose_recipe("countdown", ["parity.mode=observe", *overrides])))

    with pytest.raises(ConfigError, match=r"model\.profile\.activation: theirs\.absent cannot be imported"):
        check("model.profile.activation=theirs.absent")
    path = module("x = 1\n", "empty")
    with pytest.raises(ConfigError, match=rf"rollout\.profile\.rope: {path} has no function rope"):
        check(f"rollout.profile.rope={path}")
    with pytest.raises(ValueError, match="has no function silu_mul or sigmoid_mul or gelu, which activation chooses"):
        NumericsProfile(activation=path)
    with pytest.raises(ConfigError, match=r"is 'sillu'; it must be rlloop, .* or the dotted path of a module"):
        ProfileConfig(activation="sillu")
    with pytest.raises(ConfigError, match=r"latent is 'theirs\.kernels'; it must be absorbed, expanded$"):
        ProfileConfig(latent="theirs.kernels")


def test_every_knob_that_chooses_an_implementation_has_its_operations():
    assert list(OPERATIONS) == NumericsProfile.operations()
    assert all(hasattr(Ops, operation) for names in OPERATIONS.values() for operation in names)
