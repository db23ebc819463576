"""Splatfacto whose step reads, renders and updates only the primitives that its views can see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from nerfstudio.cameras.camera_optimizers import CameraOptimizer
from nerfstudio.cameras.cameras import Cameras
from nerfstudio.data.scene_box import OrientedBox
from nerfstudio.engine.optimizers import Optimizers
from nerfstudio.model_components.lib_bilagrid import BilateralGrid, total_variation_loss
from nerfstudio.models.splatfacto import (
    RGB2SH,
    SplatfactoModel,
    SplatfactoModelConfig,
    num_sh_bases,
    random_quat_tensor,
)
from nerfstudio.utils.colors import get_color
from nerfstudio.utils.rich_utils import CONSOLE
from pytorch_msssim import SSIM
from torch import Tensor
from torch.nn import Parameter
from torchmetrics.image import PeakSignalNoiseRatio

from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.runs.perceptual import LazyLPIPS
from odin_nerfstudio.shadow.optimizer import LazyAdam, catch_up_rows, drift_of
from odin_nerfstudio.shadow.scope import in_scope, views_in_scope
from odin_nerfstudio.splat.densify import Gather, GrowAndPrune, MonteCarlo, Shard, SplatStatistics, alone
from odin_nerfstudio.splat.l1_ssim import is_fused, l1_ssim
from odin_nerfstudio.splat.metrics import psnr
from odin_nerfstudio.splat.outputs import Outputs
from odin_nerfstudio.splat.raster import PinholeCamera, Rasterizer, RasterSettings, Rows, Splats, select_rasterizer
from odin_nerfstudio.splat.regularisers import anisotropy, mean_opacity, mean_scale
from odin_nerfstudio.viewer.heatmap import HEATMAPS, History

KEPT_PINHOLES = 4096
"""The most cameras of training views, two small matrices each, that a model keeps on its device."""


@dataclass
class OdinSplatfactoModelConfig(SplatfactoModelConfig):
    """Splatfacto's options, and how Odin densifies."""

    _target: type = field(default_factory=lambda: OdinSplatfactoModel)
    strategy: Literal["default", "mcmc"] = "default"
    """How primitives are added and removed: gsplat's growing and pruning, or 3DGS-MCMC. MCMC moves every primitive in
    every step, so its steps cost as much as the scene is large."""
    max_primitives: int | None = None
    """The most primitives that the scene grows to, over all ranks; unset, no bound for the default strategy and
    1,000,000 for MCMC, which always grows that far."""
    mcmc_noise_lr: float = 5e5
    """MCMC's noise, as a multiple of the learning rate of the positions."""
    mcmc_opacity_reg: float = 0.01
    """Weight of the mean opacity in the loss; MCMC only."""
    mcmc_scale_reg: float = 0.01
    """Weight of the mean scale in the loss; MCMC only."""
    pause_after_reset: int = 200
    """Steps without densification after the opacities were reset, whatever the number of images."""


class OdinSplatfactoModel(SplatfactoModel):
    """Gaussians under Odin's three hooks (design §3.6).

    :meth:`scope` names the candidates before they are read; the runner takes the gradients of exactly these rows back
    after the backward, and the optimizer's step publishes them.
    """

    config: OdinSplatfactoModelConfig
    ids: Tensor
    """(N,) int64 global ids of this rank's primitives, ascending."""
    next_id: int
    """The id of the next new primitive of any rank."""
    total: int
    """Number of primitives of all ranks."""

    def populate_modules(self) -> None:
        """Builds parameters from seed points (or at random), metrics and the strategy. Nothing here needs a GPU."""
        self.gauss_params = torch.nn.ParameterDict({k: Parameter(v) for k, v in self._initial_gaussians().items()})
        self.camera_optimizer: CameraOptimizer = self.config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device="cpu"
        )
        self.psnr = PeakSignalNoiseRatio(data_range=1.0)
        self.ssim = SSIM(data_range=1.0, size_average=True, channel=3)
        self.lpips = LazyLPIPS()
        self.step = 0
        self.crop_box: OrientedBox | None = None
        # "random" varies in training only; everything else sees viser's own background.
        random = self.config.background_color == "random"
        viser_background = torch.tensor([0.1490, 0.1647, 0.2157])
        self.background_color = viser_background if random else get_color(self.config.background_color)
        if self.config.use_bilateral_grid:
            x, y, w = self.config.grid_shape
            self.bil_grids = BilateralGrid(num=self.num_train_data, grid_X=x, grid_Y=y, grid_W=w)
        self.strategy = self._strategy()
        self.set_seed(0)
        grows = isinstance(self.strategy, GrowAndPrune)
        self.strategy_state = self.strategy.initialize_state(scene_scale=1.0) if grows else {}
        self.gather: Gather = alone
        self.register_buffer("ids", torch.empty(0, dtype=torch.int64), persistent=False)
        self.set_ids()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._pinholes: dict[int, PinholeCamera] = {}
        self._pinholes_for: tuple[torch.device, int] | None = None
        self._known_truth: tuple[Tensor, Tensor, int, Tensor] | None = None
        self.display: Rows | None = None
        """A copy of the whole scene, or of most of it, for looks at it while this rank has a part only."""
        self.history: History | None = None
        """What was recorded of the primitives that are shown, as far as that is known."""

    def set_seed(self, seed: int) -> None:
        """Sets the seed of what every step draws: backgrounds, and where new primitives go."""
        self.seed = self.strategy.seed = seed

    def attach(self, optimizers: Optimizers) -> None:
        """Gives the model the optimizers whose missed steps its reads apply."""
        self.optimizers = optimizers.optimizers

    def step_cb(self, optimizers: Optimizers, step: int) -> None:
        """Before every step, as splatfacto."""
        self.step = step
        self.attach(optimizers)

    # ------------------------------------------------------------------------------------------------- rendering

    def get_outputs(self, camera: Cameras) -> Outputs:
        """Renders one camera outside training units, from ``display`` where there is one, or from the rows."""
        pinhole = self.pinhole(camera, self.step)
        rows = self.display
        if rows is None:
            scope = self.scope([pinhole], self.step)
            catch_up_rows(self.optimizers, scope)
            rows = self.rows(scope)
        if self.crop_box is not None and not self.training:
            inside = self.crop_box.within(rows.means).reshape(-1)
            rows = Rows(*(field[inside] for field in rows))
        return self.render(camera, pinhole, self.rasterizer.project(rows, pinhole, self.raster_settings(self.step)))

    def rows(self, index: Tensor) -> Rows:
        """Rows of this rank by number ((R,) int64), copied within the graph."""
        params = {name: param.index_select(0, index) for name, param in self.gauss_params.items()}
        return Rows(self.ids[index], **params)

    def render(self, camera: Cameras, pinhole: PinholeCamera, splats: Splats) -> Outputs:
        """Rasterizes splats and composes the image over the background.

        Args:
            camera: of shape (1,); ``metadata["cam_idx"]`` is a training view's index.
            pinhole: the same camera as the rasterizers take it.
            splats: of this view.

        Returns:
            ``rgb`` (H, W, 3), ``depth`` (H, W, 1), ``accumulation`` (H, W, 1) and ``background``; outside training also
            the scene in the colours of :data:`~odin_nerfstudio.viewer.heatmap.HEATMAPS`, (H, W, 3) each.
        """
        absgrad = self.training and self.strategy.absgrad
        with_depth = self.config.output_depth_during_training or not self.training
        size = pinhole.width, pinhole.height
        image = self.rasterizer.rasterize(splats, *size, absgrad=absgrad, depth=with_depth)
        background = self._background(camera)
        rgb = torch.clamp(image.rgb + (1 - image.alpha) * background, 0.0, 1.0)
        if self.config.use_bilateral_grid and self.training and "cam_idx" in (camera.metadata or {}):
            rgb = self._apply_bilateral_grid(rgb[None], camera.metadata["cam_idx"], pinhole.height, pinhole.width)[0]
        depth = None
        if image.depth is not None:
            farthest = image.depth.detach().max()
            depth = torch.where(image.alpha > 0, image.depth, farthest)
        if not self.training:
            background = background.expand(pinhole.height, pinhole.width, 3)
        outputs = Outputs(rgb=rgb, depth=depth, accumulation=image.alpha, background=background)
        if not self.training:
            for name in HEATMAPS:
                outputs[name] = partial(self._heatmap, name, splats, pinhole, background)
        return outputs

    @torch.no_grad()
    def _heatmap(self, name: str, splats: Splats, pinhole: PinholeCamera, background: Tensor) -> Tensor:
        """(H, W, 3) the same splats in other colours."""
        history = History.unknown(splats.ids) if self.history is None else self.history.select(splats.ids)
        painted = replace(splats, colors=HEATMAPS[name](history))
        image = self.rasterizer.rasterize(painted, pinhole.width, pinhole.height)
        return torch.clamp(image.rgb + (1 - image.alpha) * background, 0.0, 1.0)

    @property
    def rasterizer(self) -> Rasterizer:
        """The backend for this device."""
        return select_rasterizer(self.device)

    @torch.no_grad()
    def scope(self, cameras: Sequence[PinholeCamera], step: int, among: Tensor | None = None) -> Tensor:
        """Rows that any of the cameras may touch.

        Args:
            cameras: of the views.
            step: of the run.
            among: (S,) int64 ascending, rows to choose from that are read as they are now; None: all rows, wherever
                steps that are still to come may move them, and every row where a loss reads every row.

        Returns:
            (R,) int64 ascending.
        """
        if among is None and self.training and self.loss_reads_every_row(step):
            return torch.arange(self.num_points, device=self.device)
        settings = self.raster_settings(step)
        means, scales, drift = self.means, self.scales, {}
        if among is None:
            drift = {f"{name}_drift": self._drift(name) for name in ("means", "scales")}
        else:
            means, scales = means[among], scales[among]
        inside = torch.zeros(len(means), dtype=torch.bool, device=self.device)
        for camera in cameras:
            inside |= in_scope(
                means,
                scales,
                camera.viewmat,
                camera.K,
                camera.width,
                camera.height,
                near=settings.near,
                far=settings.far,
                eps2d=settings.eps2d,
                **drift,
            )
        rows = inside.nonzero()[:, 0]
        return rows if among is None else among[rows]

    @torch.no_grad()
    def scopes(self, table: Tensor, step: int, pending: int) -> Tensor:
        """Rows that each camera may touch, wherever steps that are still to come may move them.

        Args:
            table: (V, 18) cameras; see :func:`~odin_nerfstudio.shadow.scope.views_in_scope`.
            step: of the run.
            pending: steps that may still change rows by their gradients.

        Returns:
            (V, W) int64 bitmaps.
        """
        settings = self.raster_settings(step)
        means_drift, scales_drift = (drift_of(self.optimizers.get(name), pending) for name in ("means", "scales"))
        return views_in_scope(
            self.means.detach(),
            self.scales.detach(),
            table,
            near=settings.near,
            far=settings.far,
            eps2d=settings.eps2d,
            means_drift=means_drift,
            scales_drift=scales_drift,
        )

    def all_rows(self) -> Rows:
        """All rows of this rank as they are, outside any graph."""
        return Rows(self.ids, **{name: param.detach() for name, param in self.gauss_params.items()})

    def _drift(self, name: str) -> Tensor | None:
        optimizer = self.optimizers.get(name)
        return optimizer.drift() if isinstance(optimizer, LazyAdam) else None

    def loss_reads_every_row(self, step: int) -> bool:
        """Whether a regulariser of this step is over all primitives."""
        return self.config.strategy == "mcmc" or (self.config.use_scale_regularization and step % 10 == 0)

    def pinhole(self, camera: Cameras, step: int) -> PinholeCamera:
        """nerfstudio's camera (OpenGL axes, camera → world) as the rasterizers take it, at a step's resolution.

        The last :data:`KEPT_PINHOLES` of training views are kept, unless poses are learned.

        Args:
            camera: of shape (1,); ``metadata["cam_idx"]`` is a training view's index.
            step: of the run.
        """
        halvings = max(self.config.num_downscales - step // self.config.resolution_schedule, 0) if self.training else 0
        view = (camera.metadata or {}).get("cam_idx")
        if view is None or not self.training or self.config.camera_optimizer.mode != "off":
            return self._pinhole(camera, 2**halvings)
        if self._pinholes_for != (self.device, halvings):
            self._pinholes, self._pinholes_for = {}, (self.device, halvings)
        pinhole = self._pinholes.get(view)
        if pinhole is None:
            if len(self._pinholes) >= KEPT_PINHOLES:
                self._pinholes.pop(next(iter(self._pinholes)))  # the oldest; a unit asks twice in a row for its own
            pinhole = self._pinholes[view] = self._pinhole(camera, 2**halvings)
        return pinhole

    def _pinhole(self, camera: Cameras, factor: int) -> PinholeCamera:
        """The camera for images ``factor`` times smaller, with its learned pose in training."""
        c2w = self.camera_optimizer.apply_to_camera(camera) if self.training else camera.camera_to_worlds
        rotation = (c2w[0, :3, :3] * c2w.new_tensor([1.0, -1.0, -1.0])).T
        top = torch.cat([rotation, -rotation @ c2w[0, :3, 3:4]], dim=1)
        viewmat = torch.cat([top, c2w.new_tensor([[0.0, 0.0, 0.0, 1.0]])])
        K = camera.get_intrinsics_matrices()[0]
        K[:2] /= factor
        width, height = int(camera.width.item()) // factor, int(camera.height.item()) // factor
        viewmat, K = (matrix.to(self.means, non_blocking=True) for matrix in (viewmat, K))
        return PinholeCamera(viewmat, K, width, height)

    def raster_settings(self, step: int) -> RasterSettings:
        """How images are formed at a step."""
        degree = min(step // self.config.sh_degree_interval, self.config.sh_degree)
        return RasterSettings(sh_degree=degree if self.config.sh_degree > 0 else None, mode=self.config.rasterize_mode)

    def _background(self, camera: Cameras) -> Tensor:
        if self.training and self.config.background_color == "random":
            view = (camera.metadata or {}).get("cam_idx", 0)
            color = torch.rand(3, generator=keyed_generator(self.seed, "background", self.step, view))
            return color.to(self.device, non_blocking=True)
        return self.background_color.to(self.device, non_blocking=True)

    # ---------------------------------------------------------------------------------------- losses and metrics

    def get_loss_dict(
        self, outputs: Outputs, batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Splatfacto's losses of one view; those over all primitives are :meth:`regularisers`."""
        if not is_fused(self.device):
            losses = super().get_loss_dict(outputs, batch, metrics_dict)
            losses.pop("scale_reg")
            return losses
        truth, prediction = self._truth(batch["image"], outputs["background"]), outputs["rgb"]
        if "mask" in batch:
            mask = self._downscale_if_required(batch["mask"]).to(self.device)
            truth, prediction = truth * mask, prediction * mask
        losses = {"main_loss": l1_ssim(prediction, truth, self.config.ssim_lambda)}
        if self.training:
            self.camera_optimizer.get_loss_dict(losses)
            if self.config.use_bilateral_grid:
                losses["tv_loss"] = 10 * total_variation_loss(self.bil_grids.grids)
        return losses

    def get_metrics_dict(self, outputs: Outputs, batch: dict[str, Any]) -> dict[str, Any]:
        """Splatfacto's metrics of one view; on a GPU without waiting for it, unless poses are learned."""
        if self.device.type == "cpu" or self.config.color_corrected_metrics:
            return super().get_metrics_dict(outputs, batch)
        truth = self._truth(batch["image"], outputs["background"])
        metrics = {"psnr": psnr(outputs["rgb"], truth), "gaussian_count": self.num_points}
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def _truth(self, image: Tensor, background: Tensor) -> Tensor:
        """(H, W, 3) what a rendering should look like, of an image ((H, W, 3 or 4)); uint8 if that can stay so."""
        factor = self._get_downscale_factor()
        if image.shape[2] == 3 and factor == 1:
            return image.to(self.device)
        known = self._known_truth  # metrics and loss ask one after the other
        if known is None or known[0] is not image or known[1] is not background or known[2] != factor:
            truth = self.composite_with_background(self.get_gt_img(image), background)
            known = self._known_truth = (image, background, factor, truth)
        return known[3]

    def regularisers(self, step: int) -> dict[str, Tensor]:
        """This rank's shares of the losses over all primitives that act in a step, to be added once per step.

        Splatfacto's on the shape of primitives, every tenth step if it is chosen, and those of 3DGS-MCMC.
        """
        config, losses = self.config, {}
        if config.use_scale_regularization and step % 10 == 0:
            losses["scale_reg"] = 0.1 * anisotropy(self.scales, config.max_gauss_ratio, self.total)
        if config.strategy == "mcmc":
            losses["opacity_reg"] = config.mcmc_opacity_reg * mean_opacity(self.opacities, self.total)
            losses["mcmc_scale_reg"] = config.mcmc_scale_reg * mean_scale(self.scales, self.total)
        return losses

    def get_image_metrics_and_images(
        self, outputs: Outputs, batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Splatfacto's metrics, without those that cannot be computed here (LPIPS offline)."""
        metrics, images = super().get_image_metrics_and_images(outputs, batch)
        return {name: value for name, value in metrics.items() if value == value}, images

    # --------------------------------------------------------------------------------------------- densification

    def set_ids(self, ids: Tensor | None = None, next_id: int = 0, total: int = 0) -> None:
        """Sets the global ids of this rank's primitives.

        Args:
            ids: (N,) int64, ascending; None: 0 … N − 1, those of a scene on one rank that has not been densified.
            next_id: the id of the next new primitive of any rank; N where ``ids`` is None.
            total: number of primitives of all ranks; N where ``ids`` is None.
        """
        if ids is None:
            ids, next_id, total = torch.arange(self.num_points), self.num_points, self.num_points
        self.ids, self.next_id, self.total = ids.to(self.means.device), next_id, total

    def watch(self, views: list[SplatStatistics]) -> None:
        """Hears what the backward of some views says about rows of this rank."""
        self.strategy.watch(self._shard(), views)

    def step_post_backward(self, step: int) -> None:
        """After every step: at fences, the strategy's changes."""
        shard = self._shard()
        self.strategy.step_post_backward(shard, step)
        self.ids, self.next_id, self.total = shard.ids, shard.next_id, shard.total

    def _shard(self) -> Shard:
        own = self.gauss_params, self.optimizers, self.strategy_state, self.ids
        return Shard(*own, self.next_id, self.total, self.gather)

    def _strategy(self) -> GrowAndPrune | MonteCarlo:
        config = self.config
        if config.strategy == "mcmc":
            return MonteCarlo(
                cap_max=1_000_000 if config.max_primitives is None else config.max_primitives,
                noise_lr=config.mcmc_noise_lr,
                refine_start_iter=config.warmup_length,
                refine_stop_iter=config.stop_split_at,
                refine_every=config.refine_every,
                verbose=True,
            )
        return GrowAndPrune(
            prune_opa=config.cull_alpha_thresh,
            grow_grad2d=config.densify_grad_thresh,
            grow_scale3d=config.densify_size_thresh,
            grow_scale2d=config.split_screen_size,
            prune_scale3d=config.cull_scale_thresh,
            prune_scale2d=config.cull_screen_size,
            refine_scale2d_stop_iter=config.stop_screen_size_at,
            refine_start_iter=config.warmup_length,
            refine_stop_iter=config.stop_split_at,
            reset_every=config.reset_alpha_every * config.refine_every,
            refine_every=config.refine_every,
            pause_refine_after_reset=config.pause_after_reset,
            absgrad=config.use_absgrad,
            max_primitives=config.max_primitives,
            verbose=True,
        )

    # ------------------------------------------------------------------------------------------------ parameters

    def load_state_dict(self, dict: dict[str, Any], **kwargs: Any) -> Any:
        """Loads a checkpoint with any number of primitives, splatfacto's too."""
        history = {name: value.to(self.device) for name, value in dict.items() if name.startswith(History.PREFIX)}
        others = ("lpips.", History.PREFIX)
        loaded = super().load_state_dict({k: v for k, v in dict.items() if not k.startswith(others)}, **kwargs)
        self.set_ids()
        step = history.pop(f"{History.PREFIX}step", None)
        self.history = None if step is None else History.from_rows(history, self.ids, int(step))
        return loaded

    def _initial_gaussians(self) -> dict[str, Tensor]:
        """One primitive for each seed point, or ``num_random`` of them in a cube of side ``random_scale``."""
        config = self.config
        means, colors = self.seed_points if self.seed_points is not None else (None, None)
        if means is not None and len(means) < 4 and not config.random_init:
            CONSOLE.log(
                f"The capture has {len(means)} seed points, fewer than the four that neighbour distances need: "
                f"starting from {config.num_random} random primitives."
            )
            means = None
        if means is None or config.random_init:
            means, colors = (torch.rand(config.num_random, 3) - 0.5) * config.random_scale, None
        count, bases = len(means), num_sh_bases(config.sh_degree)
        if colors is None or len(colors) == 0:
            features_dc = torch.rand(count, 3)
        else:
            rgb = colors.float() / 255
            features_dc = RGB2SH(rgb) if config.sh_degree > 0 else torch.logit(rgb, eps=1e-10)
        distances = torch.from_numpy(self.k_nearest_sklearn(means, 3)[0])
        # Coinciding seed points would make a primitive of no size, whose logarithm is −∞.
        spacing = distances.mean(dim=-1, keepdim=True).clamp_min(1e-7)
        return {
            "means": means.float().clone(),
            "scales": torch.log(spacing).repeat(1, 3),
            "quats": random_quat_tensor(count),
            "features_dc": features_dc,
            "features_rest": torch.zeros(count, bases - 1, 3),
            "opacities": torch.logit(0.1 * torch.ones(count, 1)),
        }
