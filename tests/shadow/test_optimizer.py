"""The lazy optimizer against torch's Adam, and its compiled kernels against their torch twins."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odin_nerfstudio.shadow.adam import AdamConstants, AdamRows, MissedSteps, numba, reference
from odin_nerfstudio.shadow.optimizer import LazyAdam, announce_all, catch_up_rows, drift_of, take_rows

STEPS, ROWS = 500, 300


def _sparse(rows: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def _scopes(generator: torch.Generator) -> list[torch.Tensor]:
    """Random scopes: some rows in nearly all of them, some in hardly any."""
    likelihood = torch.rand(ROWS, generator=generator) ** 3
    return [(torch.rand(ROWS, generator=generator) < likelihood).nonzero()[:, 0] for _ in range(STEPS)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("eps", [1e-15, 1e-8])
@pytest.mark.parametrize("magnitude", [1.0, 1e-7, 1e-14])
def test_dense_equals_torch_adam(dtype: torch.dtype, tolerance: float, eps: float, magnitude: float) -> None:
    """500 steps over random scopes, gradients down to where ε matters, a decaying learning rate."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, 4, dtype=dtype, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    lazy, dense = LazyAdam([ours], lr=1e-2, eps=eps), torch.optim.Adam([theirs], lr=1e-2, eps=eps)
    for step, rows in enumerate(_scopes(generator)):
        values = torch.randn(len(rows), 4, dtype=dtype, generator=generator) * magnitude
        values *= 10.0 ** -(4 * torch.rand(len(rows), 1, dtype=dtype, generator=generator))
        lazy.catch_up(rows)
        ours.grad = _sparse(rows, values, start.shape)
        theirs.grad = ours.grad.to_dense()
        for optimizer in (lazy, dense):
            optimizer.param_groups[0]["lr"] = 1e-2 * 0.999**step
            optimizer.step()
    lazy.catch_up()
    scale = theirs.detach().abs().max()
    assert (ours - theirs).abs().max() / scale <= tolerance
    moved = (theirs - start).abs().max()
    assert moved > 1e-3 * scale or magnitude < eps  # the comparison is about something
    for key in ("exp_avg", "exp_avg_sq"):
        a, b = lazy.state[ours][key], dense.state[theirs][key]
        assert (a - b).abs().max() <= 10 * tolerance * b.abs().max()


def test_rows_outside_every_scope_are_not_written() -> None:
    param = torch.nn.Parameter(torch.randn(10, 3))
    before, optimizer = param.detach().clone(), LazyAdam([param], lr=0.1)
    for _ in range(5):
        param.grad = _sparse(torch.tensor([2, 7]), torch.randn(2, 3), param.shape)
        optimizer.step()
    written = (param != before).any(dim=1).nonzero()[:, 0].tolist()
    assert written == [2, 7]
    assert optimizer.state[param]["row_step"].tolist() == [0, 0, 5, 0, 0, 0, 0, 5, 0, 0]


def test_selective_leaves_missed_steps_out() -> None:
    param = torch.nn.Parameter(torch.zeros(2, 1))
    optimizer = LazyAdam([param], lr=0.1, kind="selective")
    param.grad = _sparse(torch.tensor([0, 1]), torch.ones(2, 1), param.shape)
    optimizer.step()
    after_first = param.detach().clone()
    for _ in range(3):
        param.grad = _sparse(torch.tensor([0]), torch.ones(1, 1), param.shape)
        optimizer.step()
    optimizer.catch_up()
    assert param[1] == after_first[1]
    assert param[0] < after_first[0]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    gap=st.integers(2, 900),
    small=st.floats(-20, 0),
    steps_before=st.integers(1, 40),
    age=st.integers(0, 1),
    some=st.booleans(),
)
def test_kernels_equal_their_torch_twins(
    seed: int, gap: int, small: float, steps_before: int, age: int, some: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    missed = MissedSteps(AdamConstants(0.9, 0.999, 1e-15), steps_before, torch.device("cpu"))
    for _ in range(gap):
        missed.append(float(torch.rand(1, generator=generator)) * 1e-2)
    magnitude = 10 ** (small * torch.rand(6, 5, dtype=torch.float64, generator=generator))
    v = magnitude**2
    m = torch.randn(6, 5, dtype=torch.float64, generator=generator) * magnitude
    last = torch.randint(steps_before, missed.now + 1, (6,), generator=generator).float()
    compiled = AdamRows(torch.randn(6, 5, dtype=torch.float64, generator=generator), m, v, last, missed)
    plain = AdamRows(*(tensor.clone() for tensor in compiled[:4]), missed)
    rows = torch.tensor([4, 0, 5, 2])
    numba.catch_up(compiled, rows)
    reference.catch_up(plain, rows)
    for a, b in zip(compiled[:4], plain[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    grad = torch.randn(4, 5, dtype=torch.float64, generator=generator)
    active = torch.rand(4, generator=generator) < 0.5 if some else None
    numba.take(compiled, rows, grad, active, age)
    reference.take(plain, rows, grad, active, age)
    for a, b in zip(compiled[:4], plain[:4], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    taken = rows if active is None else rows[active]
    assert (compiled.row_step[taken] == missed.now - age).all()


SHAPES = {"means": (3,), "opacities": (1,), "rest": (15, 3), "none": (0, 3)}


class _Scene:
    """Optimizers of several parameters, which take random steps on random rows."""

    def __init__(self, kind: str = "dense") -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.params = {
            k: torch.nn.Parameter(torch.randn(ROWS, *s, generator=self.generator)) for k, s in SHAPES.items()
        }
        self.optimizers = {
            name: LazyAdam([param], lr=10.0**-power, eps=1e-15, kind=kind)  # type: ignore[arg-type]
            for power, (name, param) in enumerate(self.params.items(), 1)
        }

    def scope(self) -> torch.Tensor:
        return (torch.rand(ROWS, generator=self.generator) < 0.3).nonzero()[:, 0]

    def gradients(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: torch.randn(len(rows), *shape, generator=self.generator) for name, shape in SHAPES.items()}

    def announce(self, step: int) -> None:
        for power, optimizer in enumerate(self.optimizers.values(), 1):
            optimizer.param_groups[0]["lr"] = 10.0**-power * 0.9**step
        announce_all(self.optimizers)

    def count(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def assert_equals(self, other: _Scene) -> None:
        for name, param in self.params.items():
            assert torch.equal(param, other.params[name]), name
            ours = self.optimizers[name].state[param]
            theirs = other.optimizers[name].state[other.params[name]]
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[key], theirs[key]) for key in ours), name


@pytest.mark.parametrize("kind", ["dense", "selective"])
def test_optimizers_together_equal_each_alone(kind: str) -> None:
    together, alone = _Scene(kind), _Scene(kind)
    for step in range(30):
        for scene in (together, alone):
            rows = scene.scope()
            gradients = scene.gradients(rows)
            if scene is together:
                catch_up_rows(scene.optimizers, rows)
                scene.announce(step)
                take_rows(scene.optimizers, rows, gradients)
            else:
                for power, (name, optimizer) in enumerate(scene.optimizers.items(), 1):
                    optimizer.param_groups[0]["lr"] = 10.0**-power * 0.9**step
                    optimizer.catch_up(rows)
                    optimizer.announce()
                    optimizer.take(rows, gradients[name])
            scene.count()
    together.assert_equals(alone)
    catch_up_rows(together.optimizers)
    for optimizer in alone.optimizers.values():
        optimizer.catch_up()
    together.assert_equals(alone)


def test_rows_that_are_not_active_are_left_out() -> None:
    masked, chosen = _Scene(), _Scene()
    for step in range(10):
        for scene in (masked, chosen):
            rows = scene.scope()
            gradients = scene.gradients(rows)
            active = torch.rand(len(rows), generator=scene.generator) < 0.5
            catch_up_rows(scene.optimizers, rows)
            scene.announce(step)
            if scene is masked:
                take_rows(scene.optimizers, rows, gradients, active)
            else:
                take_rows(scene.optimizers, rows[active], {k: g[active] for k, g in gradients.items()})
            scene.count()
    masked.assert_equals(chosen)


def test_a_step_can_be_taken_after_the_next_one_was_announced() -> None:
    """Unit t + 1 is announced when it has read its rows; the rows of unit t that it does not read follow after that."""
    late, punctual = _Scene(), _Scene()
    for scene in (late, punctual):
        left: list = []
        for step in range(40):
            rows = scene.scope()
            catch_up_rows(scene.optimizers, rows)
            scene.announce(step)
            if left:
                take_rows(scene.optimizers, left[0], left[1], age=1)
            scene.count()
            following = torch.rand(len(rows), generator=scene.generator) < 0.5
            gradients = scene.gradients(rows)
            if scene is late and step < 39:
                # What is read next is not known yet here: every row that is left is kept away from the next scope.
                take_rows(scene.optimizers, rows, gradients, following)
                left = [rows[~following], {k: g[~following] for k, g in gradients.items()}]
                state = scene.generator.get_state()
                upcoming = scene.scope()
                scene.generator.set_state(state)
                again = torch.isin(left[0], upcoming)
                take_rows(scene.optimizers, left[0], left[1], again)
                left = [left[0][~again], {k: g[~again] for k, g in left[1].items()}]
            else:
                take_rows(scene.optimizers, rows, gradients)
                left = []
        catch_up_rows(scene.optimizers)
    late.assert_equals(punctual)


def test_only_announced_steps_can_be_taken() -> None:
    scene = _Scene()
    scene.announce(0)
    rows = scene.scope()
    with pytest.raises(IndexError):
        take_rows(scene.optimizers, rows, scene.gradients(rows), age=1)


def test_drift_bounds_every_catch_up() -> None:
    """An adversarial history (gradients that grow as fast as Adam's memory fades) stays inside the guard band."""
    param = torch.nn.Parameter(torch.zeros(50, 3, dtype=torch.float64))
    optimizer = LazyAdam([param], lr=0.5)
    growth = 0.999 / 0.9 * torch.linspace(0.8, 1.2, 50, dtype=torch.float64)[:, None]
    for step in range(60):
        param.grad = _sparse(torch.arange(50), (growth**step).expand(50, 3).contiguous(), param.shape)
        optimizer.step()
    for _ in range(400):
        param.grad = _sparse(torch.empty(0, dtype=torch.long), torch.empty(0, 3, dtype=torch.float64), param.shape)
        optimizer.step()
    before, bound = param.detach().clone(), optimizer.drift()
    assert bound is not None
    optimizer.catch_up()
    moved = (param - before).abs().amax(dim=1)
    assert (moved <= bound).all()
    assert moved.max() > 0.3 * bound.max()  # the band is not needlessly wide
    assert optimizer.drift().max() == 0  # type: ignore[union-attr]


def test_drift_with_two_open_steps() -> None:
    """Two announced steps with gradients that grow as fast as Adam's memory fades, then 300 without."""
    param = torch.nn.Parameter(torch.zeros(50, 1, dtype=torch.float64))
    optimizer, rows = LazyAdam([param], lr=0.5), torch.arange(50)
    growth = 0.999 / 0.9 * torch.linspace(0.8, 1.2, 50, dtype=torch.float64)[:, None]
    assert drift_of(optimizer) is None and drift_of(None) is None
    for step in range(60):
        optimizer.announce()
        optimizer.take(rows, growth**step)
        optimizer.step()
    before = param.detach().clone()
    optimizers: dict[str, torch.optim.Optimizer] = {"": optimizer}
    announce_all(optimizers)
    announce_all(optimizers)
    for _ in range(300):
        announce_all(optimizers)
    drift = drift_of(optimizer, pending=2)
    assert drift is not None and len(drift.table) == 363
    bound = drift.bounds(torch.float64)
    missed = optimizer._rows((0, 0), param).missed
    for step in (60, 61):
        state = optimizer.state[param]
        m = state["exp_avg"] * 0.9 + growth**step * 0.1
        v = state["exp_avg_sq"] * 0.999 + (growth**step) ** 2 * 0.001
        state["exp_avg"].copy_(m)
        state["exp_avg_sq"].copy_(v)
        c1, c2 = missed.constants.corrections(step + 1)
        param.data -= 0.5 / c1 * m / ((v / c2).sqrt() + 1e-8)
        state["row_step"].fill_(step + 1)
    optimizer.catch_up()
    moved = (param - before).abs().amax(dim=1)
    assert (moved <= bound).all()
    assert moved.max() > 0.3 * bound.max()


def test_state_survives_a_round_trip() -> None:
    param = torch.nn.Parameter(torch.randn(8, 2))
    optimizer = LazyAdam([param], lr=0.1)
    for _ in range(3):
        param.grad = _sparse(torch.tensor([1, 5]), torch.randn(2, 2), param.shape)
        optimizer.step()
    optimizer.catch_up()
    other = torch.nn.Parameter(param.detach().clone())
    loaded = LazyAdam([other], lr=0.1)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, o in ((param, optimizer), (other, loaded)):
        p.grad = _sparse(torch.tensor([0, 5]), torch.ones(2, 2), param.shape)
        o.step()
        o.catch_up()
    assert torch.equal(param, other)


def test_torch_adam_state_loads() -> None:
    param = torch.nn.Parameter(torch.randn(4, 2))
    theirs = torch.optim.Adam([param], lr=0.1)
    param.grad = torch.ones_like(param)
    theirs.step()
    ours = LazyAdam([param], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[param]["row_step"].tolist() == [1] * 4


def test_betas_are_checked() -> None:
    with pytest.raises(ValueError, match="β₁ < β₂"):
        LazyAdam([torch.nn.Parameter(torch.zeros(1, 1))], betas=(0.999, 0.9))


def test_gradient_of_other_rows_than_were_read_is_applied_in_full() -> None:
    """The short cut for rows just caught up must not be taken for equal looking ones, nor for repeated rows."""
    start = torch.randn(6, 2, dtype=torch.float64)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    lazy, dense = LazyAdam([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    for rows in ([0, 1], [2, 3], [1, 1, 4], [0, 5]):
        lazy.catch_up(torch.tensor([0, 1]))
        index = torch.tensor(rows)
        grad = torch.sparse_coo_tensor(index[None], torch.ones(len(rows), 2).double(), (6, 2), check_invariants=False)
        ours.grad, theirs.grad = grad, grad.to_dense()
        lazy.step()
        dense.step()
    lazy.catch_up()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
