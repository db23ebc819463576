"""The model: reading by scope changes cost, never values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from nerfstudio.cameras.cameras import Cameras, CameraType
from nerfstudio.data.scene_box import OrientedBox, SceneBox
from torch import Tensor

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.plan.schedule import Group
from odin_nerfstudio.runs import perceptual
from odin_nerfstudio.shadow.optimizer import LazyAdam
from odin_nerfstudio.shadow.policy import Barrier, Quality
from odin_nerfstudio.splat.model import OdinSplatfactoModel, OdinSplatfactoModelConfig
from odin_nerfstudio.splat.raster import PinholeCamera
from odin_nerfstudio.splat.runner import UnitRunner

BOX = SceneBox(torch.tensor([[-1.0, -1, -1], [1, 1, 1]]))


def make_model(seed_points: tuple[Tensor, Tensor] | None = None, kind: type | None = None, **options: Any):
    """A small scene spread along x, in training mode at step 0."""
    torch.manual_seed(0)
    if seed_points is None:
        spread = torch.tensor([6.0, 1.0, 1.0])
        seed_points = ((torch.rand(400, 3) - 0.5) * spread, torch.randint(0, 255, (400, 3)))
    options = {"num_downscales": 0, "sh_degree_interval": 5, "background_color": "black"} | options
    config = OdinSplatfactoModelConfig(**options)
    model = (kind or OdinSplatfactoModel)(config, scene_box=BOX, num_train_data=6, seed_points=seed_points).train()
    # Balls have no gradient by rotation but rounding, which Adam would blow up to the learning rate.
    model.scales.data += 0.3 * torch.randn(model.scales.shape)
    return model


def make_camera(x: float, index: int = 0, size: tuple[int, int] = (40, 30)) -> Cameras:
    """Looks along −z at the part of the scene near ``x``."""
    c2w = torch.eye(4)[None, :3]
    c2w[0, :, 3] = torch.tensor([x, 0.0, 2.5])
    return Cameras(
        camera_to_worlds=c2w,
        fx=torch.tensor([[2.0 * size[0]]]),
        fy=torch.tensor([[2.0 * size[0]]]),
        cx=torch.tensor([[size[0] / 2]]),
        cy=torch.tensor([[size[1] / 2]]),
        width=torch.tensor([[size[0]]]),
        height=torch.tensor([[size[1]]]),
        camera_type=CameraType.PERSPECTIVE,
        metadata={"cam_idx": index},
    )


class EveryRow(OdinSplatfactoModel):
    """The reference: every view reads the whole scene."""

    def scope(self, cameras: Any, step: int) -> Tensor:
        return torch.arange(self.num_points)


RATES = {"means": 1e-3, "scales": 5e-3, "quats": 1e-3, "features_dc": 2e-2, "features_rest": 1e-3, "opacities": 5e-2}


class Views:
    """Stands in for the DataManager: cameras, and which of them each step uses."""

    def __init__(self, cameras: list[Cameras], groups: list[list[int]]) -> None:
        self.cameras = cameras
        self.groups = groups
        self.plan = self.schedule = self

    def group(self, step: int) -> Group:
        views = np.array(self.groups[step % len(self.groups)])
        return Group(step, views, np.zeros(len(views), dtype=np.int64))

    def train_camera(self, view: int) -> Cameras:
        return self.cameras[view]


def make_runner(model: OdinSplatfactoModel, views: Views, adam: type[torch.optim.Optimizer] = LazyAdam) -> UnitRunner:
    model.optimizers = {name: adam([param], lr=RATES[name], eps=1e-15) for name, param in model.gauss_params.items()}
    return UnitRunner(model, views, World.current(), Quality())  # type: ignore[arg-type]


def train(runner: UnitRunner, model: OdinSplatfactoModel, views: Views, targets: list[Tensor], steps: int) -> None:
    """The trainer's loop without nerfstudio."""
    for step in range(steps):
        model.step = step

        def render(step: int = step) -> Tensor:
            losses = []
            for view, splats in zip(views.group(step).views, runner.leaves(step), strict=True):
                camera = views.cameras[view]
                output = model.render(camera, model.pinhole(camera, step), splats)
                losses.append((output["rgb"] - targets[view]).abs().mean())
            return torch.stack(losses).sum() / len(losses)

        runner.run(step, render, lambda step=step: step + 1 == steps)  # type: ignore[misc]


def take_densely(
    optimizers: Mapping[str, torch.optim.Optimizer],
    rows: Tensor,
    gradients: Mapping[str, Tensor],
    active: Tensor,
    age: int,
) -> None:
    """A step of torch's Adam over every row, on the same gradients."""
    for name, gradient in gradients.items():
        (param,) = optimizers[name].param_groups[0]["params"]
        param.grad = torch.zeros_like(param)
        param.grad[rows[active]] = gradient[active]
        optimizers[name].step()
        param.grad = None


def make_target(seed: int, size: tuple[int, int] = (40, 30)) -> Tensor:
    return torch.rand(size[1], size[0], 3, generator=torch.Generator().manual_seed(seed))


def test_training_by_scope_equals_training_every_row_with_torch_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's first steps magnify rounding to the learning rate, so a few rows differ; nearly all must agree."""
    views = Views([make_camera(-2.0), make_camera(2.0, index=1), make_camera(0.5, index=2)], [[0], [1], [2]])
    targets = [make_target(i) for i in range(3)]
    start, ours, theirs = make_model(), make_model(), make_model(kind=EveryRow)
    train(make_runner(ours, views), ours, views, targets, 24)
    late = (ours.optimizers["means"].state[ours.means]["row_step"] < 24).float().mean()
    assert late > 0.2  # rows really were left alone
    for optimizer in ours.optimizers.values():
        optimizer.catch_up()  # type: ignore[attr-defined]
    monkeypatch.setattr("odin_nerfstudio.splat.runner.take_rows", take_densely)
    train(make_runner(theirs, views, torch.optim.Adam), theirs, views, targets, 24)
    for name, param in ours.gauss_params.items():
        moved = (theirs.gauss_params[name] - start.gauss_params[name]).detach().norm()
        assert (param - theirs.gauss_params[name]).detach().norm() <= 2e-3 * moved, name


def test_step_writes_the_rows_with_a_gradient_only() -> None:
    views, model = Views([make_camera(2.0)], [[0]]), make_model()
    before = {name: param.detach().clone() for name, param in model.gauss_params.items()}
    runner = make_runner(model, views)
    train(runner, model, views, [make_target(0)], 1)
    written = model.optimizers["means"].state[model.means]["row_step"] == 1
    assert 0 < written.sum() < model.num_points / 2
    for name, param in model.gauss_params.items():
        assert torch.equal(param[~written], before[name][~written])
    assert torch.equal(runner.graph.versions == 0, written)


def test_group_gradient_is_the_mean_of_its_views(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(40, 30), (24, 36)]
    cameras = [make_camera(-2.0), make_camera(0.0, index=1, size=sizes[1])]
    targets = [make_target(i, size) for i, size in enumerate(sizes)]

    def gradients(group: list[int]) -> dict[str, Tensor]:
        model, found = make_model(), {}

        def keep(_: Any, rows: Tensor, values: Mapping[str, Tensor], active: Tensor, age: int) -> None:
            for name, value in values.items():
                found[name] = torch.zeros_like(model.gauss_params[name])
                found[name][rows] = value

        monkeypatch.setattr("odin_nerfstudio.splat.runner.take_rows", keep)
        views = Views(cameras, [group])
        train(make_runner(model, views), model, views, targets, 1)
        return found

    together, first, second = gradients([0, 1]), gradients([0]), gradients([1])
    assert set(together) == set(RATES)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, (first[name] + second[name]) / 2, rtol=1e-4, atol=1e-6)


def test_barrier_and_quality_agree_to_the_last_bit() -> None:
    views = Views([make_camera(x, index=i) for i, x in enumerate((-2.0, 2.0, 0.5, -0.5))], [[0, 1], [2, 3], [1, 2]])
    targets = [make_target(i) for i in range(4)]
    results = []
    for policy in (Barrier(), Quality()):
        model = make_model()
        runner = make_runner(model, views)
        runner.graph.policy = policy
        train(runner, model, views, targets, 12)
        results.append({name: param.detach().clone() for name, param in model.gauss_params.items()})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_camera_optimizer_gets_gradients() -> None:
    model = make_model(
        camera_optimizer=OdinSplatfactoModelConfig().camera_optimizer.__class__(mode="SO3xR3"), sh_degree=1
    )
    views = Views([make_camera(0.0, index=3)], [[0]])
    train(make_runner(model, views), model, views, [make_target(0)], 1)
    grad = model.camera_optimizer.pose_adjustment.grad
    assert (grad[3] != 0).all()
    assert (grad[[0, 1, 2, 4, 5]] == 0).all()


def test_background_is_drawn_for_step_and_view() -> None:
    model = make_model(background_color="random")

    def background(step: int, view: int) -> Tensor:
        model.step = step
        return model.get_outputs(make_camera(0.0, index=view))["background"]

    assert torch.equal(background(4, 1), background(4, 1))
    assert not torch.equal(background(4, 1), background(5, 1))
    assert not torch.equal(background(4, 1), background(4, 2))


@pytest.mark.parametrize(("color", "value"), [("white", 1.0), ("black", 0.0)])
def test_rgba_image_is_composed_over_the_background(color: str, value: float) -> None:
    model = make_model(background_color=color).eval()
    outputs = model.get_outputs_for_camera(make_camera(0.0))
    image = torch.zeros(30, 40, 4, dtype=torch.uint8)
    truth = model.composite_with_background(model.get_gt_img(image), outputs["background"])
    assert torch.equal(truth, torch.full((30, 40, 3), value))


def test_crop_box_leaves_out_what_lies_outside() -> None:
    model = make_model().eval()
    box = OrientedBox(R=torch.eye(3), T=torch.tensor([50.0, 0, 0]), S=torch.ones(3))
    assert model.get_outputs_for_camera(make_camera(0.0))["accumulation"].max() > 0.1
    assert model.get_outputs_for_camera(make_camera(0.0), obb_box=box)["accumulation"].max() == 0


def test_mask_removes_pixels_from_the_loss() -> None:
    model = make_model()
    outputs = model.get_outputs(make_camera(0.0))
    mask = torch.zeros(30, 40, 1, dtype=torch.bool)
    image = torch.randint(0, 255, (30, 40, 3), dtype=torch.uint8)
    losses = model.get_loss_dict(outputs, {"image": image, "mask": mask})
    assert losses["main_loss"] < 1e-6


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"num_downscales": 1}, {"use_bilateral_grid": True}])
def test_losses_by_the_fused_path_are_splatfactos(
    options: dict[str, Any], masked: bool, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(**options)
    outputs = model.get_outputs(make_camera(0.0))
    batch = {"image": torch.randint(0, 255, (30, 40, channels), dtype=torch.uint8)}
    if masked:
        batch["mask"] = torch.rand(30, 40, 1) < 0.7
    expected = model.get_loss_dict(outputs, batch)
    monkeypatch.setattr("odin_nerfstudio.splat.model.is_fused", lambda device: True)
    found = model.get_loss_dict(outputs, batch)
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_truth_stays_bytes_unless_it_is_scaled_or_composed() -> None:
    model, background = make_model(num_downscales=1), torch.zeros(3)
    images = [torch.randint(0, 255, (30, 40, channels), dtype=torch.uint8) for channels in (3, 4)]
    assert [model._truth(image, background).dtype for image in images] == [torch.float32, torch.float32]
    model.step = model.config.resolution_schedule
    assert [model._truth(image, background).dtype for image in images] == [torch.uint8, torch.float32]


def same_pinhole(one: PinholeCamera, other: PinholeCamera) -> bool:
    size = one.width == other.width and one.height == other.height
    return size and torch.equal(one.viewmat, other.viewmat) and torch.equal(one.K, other.K)


def test_pinholes_of_training_views_are_kept_by_resolution() -> None:
    model = make_model(num_downscales=1, resolution_schedule=10)
    camera, other = make_camera(0.0, 3, (41, 30)), make_camera(0.5, 4, (41, 30))
    small = model.pinhole(camera, 0)
    assert (small.width, small.height) == (20, 15)
    assert (int(camera.width), int(camera.height)) == (41, 30)
    assert model.pinhole(camera, 9) is small
    assert not same_pinhole(model.pinhole(other, 0), small)
    large = model.pinhole(camera, 10)
    assert (large.width, large.height) == (41, 30)
    torch.testing.assert_close(large.K[:2], 2 * small.K[:2])
    assert same_pinhole(model.pinhole(camera, 0), small)


def test_pinholes_of_other_cameras_are_not_kept() -> None:
    model, training_view, eval_view = make_model(), make_camera(0.0, 3), make_camera(0.5, 3)
    kept = model.pinhole(training_view, 0)
    model.eval()
    assert not same_pinhole(model.pinhole(eval_view, 0), kept)
    model.train()
    assert model.pinhole(training_view, 0) is kept
    free = make_camera(0.5)
    free.metadata = None
    assert not same_pinhole(model.pinhole(free, 0), kept)
    assert model.pinhole(training_view, 0) is kept


def test_pinholes_follow_learned_poses() -> None:
    model = make_model(camera_optimizer=OdinSplatfactoModelConfig().camera_optimizer.__class__(mode="SO3xR3"))
    camera = make_camera(0.0, 3)
    before = model.pinhole(camera, 0)
    with torch.no_grad():
        model.camera_optimizer.pose_adjustment[3, 0] = 0.1
    assert not same_pinhole(model.pinhole(camera, 0), before)


def test_only_so_many_pinholes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odin_nerfstudio.splat.model.KEPT_PINHOLES", 2)
    model, cameras = make_model(), [make_camera(0.1 * index, index) for index in range(4)]
    first = [model.pinhole(camera, 0) for camera in cameras]
    again = [model.pinhole(camera, 0) for camera in reversed(cameras)][::-1]
    assert [one is other for one, other in zip(first, again, strict=True)] == [False, False, True, True]
    assert all(map(same_pinhole, first, again))


@pytest.mark.parametrize("points", [0, 1, 3])
def test_fewer_than_four_points_start_at_random(points: int, capsys: pytest.CaptureFixture[str]) -> None:
    seed_points = (torch.rand(points, 3), torch.randint(0, 255, (points, 3)))
    model = make_model(seed_points, num_random=50)
    assert model.num_points == 50
    assert "50 random primitives" in capsys.readouterr().out


def test_coinciding_points_have_a_size() -> None:
    model = make_model((torch.zeros(10, 3), torch.zeros(10, 3)))
    assert torch.isfinite(model.scales).all()


def test_sh_degree_zero_trains_colours_through_a_sigmoid() -> None:
    model = make_model(sh_degree=0)
    outputs = model.get_outputs(make_camera(0.0))
    outputs["rgb"].sum().backward()
    assert (model.features_dc.grad != 0).any()
    assert model.features_rest.shape == (400, 0, 3)


def test_metrics_without_lpips_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perceptual, "_build", lambda: None)
    model = make_model().eval()
    outputs = model.get_outputs_for_camera(make_camera(0.0))
    metrics, _ = model.get_image_metrics_and_images(outputs, {"image": torch.rand(30, 40, 3)})
    assert set(metrics) == {"psnr", "ssim"}
    assert all(math.isfinite(value) for value in metrics.values())


def test_checkpoint_of_another_size_and_with_lpips_loads() -> None:
    small, large = make_model((torch.rand(9, 3), torch.zeros(9, 3))), make_model()
    state = {**large.state_dict(), "lpips.net.weight": torch.zeros(1)}
    small.load_state_dict(state)
    assert torch.equal(small.means, large.means)
