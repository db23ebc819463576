"""NeRF-XL as a nerfstudio model: rays in, colours out, whatever the number of tiles and ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
import tyro
from nerfstudio.cameras.camera_optimizers import CameraOptimizer, CameraOptimizerConfig
from nerfstudio.cameras.rays import RayBundle
from nerfstudio.engine.callbacks import TrainingCallback, TrainingCallbackAttributes, TrainingCallbackLocation
from nerfstudio.model_components import renderers
from nerfstudio.models.base_model import Model, ModelConfig
from nerfstudio.utils import colormaps
from pytorch_msssim import SSIM
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torchmetrics.image import PeakSignalNoiseRatio

from odin_nerfstudio.comm.world import World
from odin_nerfstudio.draws import keyed_generator
from odin_nerfstudio.errors import UserError
from odin_nerfstudio.nerfxl.compose import compose
from odin_nerfstudio.nerfxl.contraction import Contraction
from odin_nerfstudio.nerfxl.exchange import EXCHANGES, Radiance
from odin_nerfstudio.nerfxl.field import SharedHead, SharedHeadConfig, TileFieldConfig
from odin_nerfstudio.nerfxl.hash_grid import HashGridConfig
from odin_nerfstudio.nerfxl.lattice import Samples, lattice, split
from odin_nerfstudio.nerfxl.occupancy import OccupancyConfig
from odin_nerfstudio.nerfxl.rays import cross
from odin_nerfstudio.nerfxl.scene import Scene
from odin_nerfstudio.nerfxl.segments import WIDTH, integrate
from odin_nerfstudio.nerfxl.tile import Tile
from odin_nerfstudio.nerfxl.tiles import Tiles, tiles_of_rank
from odin_nerfstudio.runs.perceptual import LazyLPIPS
from odin_nerfstudio.shadow.timeline import Kind, Timeline
from odin_nerfstudio.viewer.colors import rank_color

Outputs = dict[str, Any]

_WARMUP_SHARE = 2
"""Before occupancy grids know anything, rays have this fraction of their samples."""
_FIRST_NEAR = 0.6
"""Where rays begin at first, in units of the scene."""


@dataclass
class NerfXLModelConfig(ModelConfig):
    """Configuration of :class:`NerfXLModel`."""

    _target: type = field(default_factory=lambda: NerfXLModel)
    tiles: int | None = None
    """Number of tiles; unset, one for each rank. A run that resumes keeps its number."""
    exchange: Literal["tile", "sample"] = "tile"
    """What ranks send each other: six numbers per ray and tile, or every sample (the paper's baseline). The images are
    the same."""
    samples_per_ray: int = 512
    """Intervals along a ray, over all tiles; those in empty space are skipped."""
    log2_table_size: int = 19
    """Each level of a tile's hash grid has at most 2^this entries."""
    levels: int = 16
    """Levels of a tile's hash grid."""
    features_per_level: int = 2
    """Features of an entry: 1, 2, 4 or 8."""
    base_resolution: int = 16
    """Vertices along an edge of the coarsest level."""
    max_resolution: int = 2048
    """Vertices along an edge of the finest level."""
    hidden_dim: int = 64
    """Width of the density and colour networks."""
    appearance_embed_dim: int = 0
    """Numbers that describe exposure and weather of each training image, such as 32; 0 for none. Where images are alike
    it costs quality: views that are not training images are rendered with an appearance that none of them had."""
    use_average_appearance_embedding: bool = True
    """Whether views that are not training images get the mean appearance, or else zeros."""
    occupancy_resolution: int = 128
    """Cells along an edge of a tile's occupancy grid."""
    occupancy_warmup_steps: int = 256
    """Until this step nothing is skipped, and rays have half of their samples."""
    occupancy_threshold: float = 0.01
    """Cells whose samples were less opaque than this are skipped."""
    near_plane: float | None = None
    """Distance at which rays begin; unset, half of that of the nearest points."""
    near_warmup_steps: int = 256
    """Over so many steps rays begin ever nearer to the camera, from 0.6 of the median distance to the points on: what
    is seen is found where views agree before there is room for fog in front of single cameras. 0: all at once."""
    far_plane: float | None = None
    """Distance at which rays end; unset, four times that of the farthest points."""
    background_color: Literal["random", "black", "white"] = "random"
    """What lies behind everything; random: another colour for each training ray, black elsewhere."""
    distortion_loss_mult: float = 0.002
    """Weight of mip-NeRF 360's distortion, with lengths in units of the median distance from cameras to points."""
    hash_decay_mult: float = 0.0
    """Weight of the mean squared entry of each level of the hash grids (Zip-NeRF)."""
    eval_num_rays_per_chunk: int = 8192
    """Rays rendered at a time outside training."""
    camera_optimizer: CameraOptimizerConfig = field(default_factory=lambda: CameraOptimizerConfig(mode="off"))
    """Whether the poses of the training cameras are corrected."""
    seed: Annotated[int, tyro.conf.Suppress] = 0
    """Set by the pipeline."""
    enable_collider: Annotated[bool, tyro.conf.Suppress] = False
    collider_params: Annotated[dict[str, float] | None, tyro.conf.Suppress] = None
    loss_coefficients: Annotated[dict[str, float], tyro.conf.Suppress] = field(default_factory=dict)

    @property
    def tile_field(self) -> TileFieldConfig:
        """Sizes of a tile's field."""
        grid = HashGridConfig(
            levels=self.levels,
            features=self.features_per_level,
            log2_table_size=self.log2_table_size,
            base_resolution=self.base_resolution,
            max_resolution=self.max_resolution,
        )
        return TileFieldConfig(grid=grid, hidden_dim=self.hidden_dim)

    @property
    def shared_head(self) -> SharedHeadConfig:
        """Sizes of what all tiles share."""
        return SharedHeadConfig(
            hidden_dim=self.hidden_dim,
            appearance_embed_dim=self.appearance_embed_dim,
            use_average_appearance_embedding=self.use_average_appearance_embedding,
        )

    @property
    def occupancy(self) -> OccupancyConfig:
        """Sizes of a tile's occupancy grid."""
        return OccupancyConfig(
            resolution=self.occupancy_resolution,
            warmup_steps=self.occupancy_warmup_steps,
            threshold=self.occupancy_threshold,
        )


class NerfXLModel(Model):
    """One radiance field in K tiles, of which this process holds some or all (arXiv 2404.16221; design §4).

    What all ranks need of each other is exchanged within :meth:`together` only; elsewhere (a viewer's thread) a rank
    renders the tiles that it has.

    Raises:
        UserError: for sizes that cannot be followed.
    """

    config: NerfXLModelConfig

    def populate_modules(self) -> None:
        """Cuts space into tiles and builds those of this rank, the shared head and the metrics."""
        config = self.config
        self.world = World.current(self.kwargs.get("device", "cpu"))
        self.scene: Scene = self.kwargs["metadata"]["scene"]
        count = self.world.size if config.tiles is None else config.tiles
        if count < 1:
            raise UserError(f"--pipeline.model.tiles {count}: there is at least one tile.")
        for name in ("samples_per_ray", "occupancy_resolution"):
            if (value := getattr(config, name)) < 1:
                raise UserError(f"--pipeline.model.{name.replace('_', '-')} {value}: at least 1 is needed.")
        self._set_tiles(Tiles.build(self.scene.seeds, count))
        self.held = tiles_of_rank(self.world.rank, self.world.size, count)
        self.fields = nn.ModuleDict(
            {str(tile): Tile(config.tile_field, config.occupancy, config.seed, tile) for tile in self.held}
        )
        generator = keyed_generator(config.seed, "head")
        geometry = config.tile_field.geo_feat_dim
        self.head = SharedHead(config.shared_head, geometry, self.num_train_data, generator)
        self.camera_optimizer: CameraOptimizer = config.camera_optimizer.setup(
            num_cameras=self.num_train_data, device="cpu"
        )
        self.psnr = PeakSignalNoiseRatio(data_range=1.0)
        self.ssim = SSIM(data_range=1.0, size_average=True, channel=3)
        self.lpips = LazyLPIPS()
        self.step = 0
        self.timeline = Timeline(steps=0)
        """Where the time of a step goes."""
        self.others: dict[int, Tile] = {}
        """Copies of other ranks' tiles, for looks outside :meth:`together`."""
        self._together_in: int | None = None
        palette = torch.tensor([rank_color(tile) for tile in range(count)])
        self.register_buffer("palette", palette, persistent=False)

    # ---------------------------------------------------------------------------------------------------- tiles

    @property
    def tiles(self) -> Tiles:
        """The K tiles of all ranks, on the model's device."""
        if self._tiles.bounds.device != self.device:
            self._set_tiles(self._tiles.to(self.device))
        return self._tiles

    def _set_tiles(self, tiles: Tiles) -> None:
        self._tiles = tiles
        self._contractions = [Contraction.of(tiles, tile) for tile in range(len(tiles))]

    def _tile(self, number: int) -> tuple[Tile, Contraction]:
        if self._contractions[number].centre.device != self.device:
            self._set_tiles(self._tiles.to(self.device))
        tile = self.others[number] if number in self.others else self.fields[str(number)]
        return tile, self._contractions[number]  # type: ignore[return-value]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within this, rendering by this thread is a collective call: all ranks render the same rays and see all tiles.

        A viewer's thread may render meanwhile, by itself.
        """
        before, self._together_in = self._together_in, threading.get_ident()
        try:
            yield
        finally:
            self._together_in = before

    @property
    def _is_together(self) -> bool:
        return self._together_in == threading.get_ident()

    def copy_of(self, number: int, state: Mapping[str, Tensor]) -> Tile:
        """A tile that another rank has, from its state, on this rank's device."""
        config = self.config
        tile = Tile(config.tile_field, config.occupancy, config.seed, number).to(self.device)
        tile.load_state_dict(state)
        return tile.requires_grad_(False)

    # ------------------------------------------------------------------------------------------------- rendering

    def get_outputs(self, ray_bundle: RayBundle) -> Outputs:
        """Renders a bundle of R rays.

        Returns:
            ``rgb`` (R, 3), ``accumulation`` (R, 1), ``depth`` (R, 1) the mean distance of what is seen, far where
            nothing is, and ``tile`` (R, 3): tiles as colours, mixed as they contribute. While training also
            ``distortion`` (R, 1) in units of the scene, and ``background`` (R, 3).
        """
        if self.training:
            self.camera_optimizer.apply_to_raybundle(ray_bundle)
        origins, directions = ray_bundle.origins, ray_bundle.directions
        near, far = self._interval(ray_bundle)
        rays = len(origins)
        tiles, numbers = self.tiles, self._numbers()
        ends = lattice(near, far, self._samples_per_ray(), jitter=self._draw("jitter", rays, 1), knee=self.scene.unit)
        crossings = cross(tiles, origins.detach(), directions.detach(), near, far)
        occupied = self._occupied if self._knows_where else None
        parts = split(ends, origins.detach(), directions.detach(), tiles, numbers, occupied)
        image_ids = ray_bundle.camera_indices
        per_ray = self.head.encode_rays(
            directions, image_ids.reshape(-1) if self.training and image_ids is not None else None
        )
        with self._span("compute", "fields"):
            known = {
                tile: self._radiance(tile, part, origins, directions, per_ray)
                for tile, part in zip(numbers, parts, strict=True)
            }
        background = self._background(rays)
        seen = compose(self._share(known, crossings.enter), crossings.order, crossings.enter, background)
        accumulation = seen.accumulation
        depth = torch.where(accumulation > 1e-4, seen.depth / accumulation.clamp_min(1e-4), far)
        outputs = {
            "rgb": seen.rgb,
            "accumulation": accumulation,
            "depth": depth.detach(),
            "tile": (seen.tile_weights.detach() @ self.palette).clamp(0, 1),
        }
        if self.training:
            outputs |= {"distortion": seen.distortion / self.scene.unit, "background": background}
        return outputs

    def _radiance(self, tile: int, part: Samples, origins: Tensor, directions: Tensor, per_ray: Tensor) -> Radiance:
        module, contraction = self._tile(tile)
        if self._knows_where:
            part = module.visible(part, origins.detach(), directions.detach(), contraction, self.scene.unit)
        return module.radiance(part, origins, directions, contraction, self.scene.unit, self.head, per_ray)

    def _numbers(self) -> list[int]:
        """The tiles that this rank integrates."""
        return list(self.held) if self._is_together else sorted({*self.held, *self.others})

    @contextmanager
    def _span(self, kind: Kind, name: str) -> Iterator[None]:
        """Records a part of a training step."""
        with self.timeline.span(kind, self.step, name) if self.training else nullcontext():
            yield

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self._span("communication", self.config.exchange), self._span("wait", "segments"):
            yield

    def _share(self, known: Mapping[int, Radiance], enter: Tensor) -> Tensor:
        """(R, K, 6) segments of all tiles; those that nobody here knows are empty."""
        if self._is_together or self.world.size == 1:
            shared = EXCHANGES[self.config.exchange](self.world, list(known.values()), enter, self._waiting)
            if self.training:
                samples = {f"tile {tile}": len(radiance.sigma) for tile, radiance in known.items()}
                self.timeline.count(self.step, bytes=shared.sent, **samples)
            return shared.segments
        segments = enter.new_zeros(*enter.shape, WIDTH)
        for tile, radiance in known.items():
            segments[:, tile] = integrate(*radiance, enter[:, tile])
        return segments

    def _occupied(self, tile: int, positions: Tensor) -> Tensor:
        module, contraction = self._tile(tile)
        return module.occupancy(contraction(positions))

    def _samples_per_ray(self) -> int:
        count = self.config.samples_per_ray
        return count if self._knows_where else max(count // _WARMUP_SHARE, 1)

    @property
    def _knows_where(self) -> bool:
        """Whether the field says by now where samples are worth their cost."""
        return self.step >= self.config.occupancy_warmup_steps

    def _interval(self, bundle: RayBundle) -> tuple[Tensor, Tensor]:
        """(R, 1) where rays begin and end at this step: the scene's, or the part of it that a crop leaves.

        Outside training too: what nothing has trained yet, in front of the cameras, may be opaque.
        """
        config, scene = self.config, self.scene
        near = scene.near if config.near_plane is None else config.near_plane
        far = max(scene.far if config.far_plane is None else config.far_plane, near)
        if self.step < config.near_warmup_steps:
            first = max(near, min(_FIRST_NEAR * scene.unit, (near + far) / 2))
            near += (first - near) * (1 - self.step / config.near_warmup_steps)
        if bundle.nears is None or bundle.fars is None:
            like = bundle.origins[:, :1].detach()
            return torch.full_like(like, near), torch.full_like(like, far)
        return bundle.nears.clamp(near, far), bundle.fars.clamp(near, far)

    def _draw(self, purpose: str, rays: int, columns: int) -> Tensor | None:
        """(``rays``, ``columns``) in [0, 1) for this step, the same on all ranks; None outside training."""
        if not self.training:
            return None
        generator = keyed_generator(self.config.seed, purpose, self.step)
        return torch.rand(rays, columns, generator=generator).to(self.device)

    def _background(self, rays: int) -> Tensor:
        """(R, 3) in training, else (3,)."""
        chosen = self.config.background_color
        if not self.training and (override := renderers.BACKGROUND_COLOR_OVERRIDE) is not None:
            return override.to(self.device)
        drawn = self._draw("background", rays, 3) if chosen == "random" else None
        if drawn is not None:
            return drawn
        colour = torch.full((3,), float(chosen == "white"), device=self.device)
        return colour.expand(rays, 3) if self.training else colour

    def get_rgba_image(self, outputs: Outputs, output_name: str = "rgb") -> Tensor:
        """(..., 4) colour without the background, and accumulation, for exports."""
        accumulation = outputs["accumulation"]
        colour = outputs[output_name] - (1 - accumulation) * self._background(1).reshape(-1)[:3]
        return torch.cat([(colour / accumulation.clamp_min(1e-10)).clamp(0, 1), accumulation], dim=-1)

    # ------------------------------------------------------------------------------------------------- training

    def get_param_groups(self) -> dict[str, list[Parameter]]:
        """``fields``: private to the tiles of this rank. ``head`` and ``camera_opt``: the same on all ranks."""
        groups = {"head": list(self.head.parameters())}
        if len(self.fields):
            groups["fields"] = list(self.fields.parameters())
        self.camera_optimizer.get_param_groups(param_groups=groups)
        return groups

    def get_training_callbacks(self, attributes: TrainingCallbackAttributes) -> list[TrainingCallback]:
        """Before every step: occupancy grids look around when it is their turn."""
        return [TrainingCallback([TrainingCallbackLocation.BEFORE_TRAIN_ITERATION], self.prepare_step)]

    def prepare_step(self, step: int) -> None:
        """Announces a step to the draws and the occupancy grids."""
        self.step = step
        for tile in self.held:
            module, contraction = self._tile(tile)
            module.look_around(step, contraction, self.scene, self.config.samples_per_ray)

    def update_to_step(self, step: int) -> None:
        """After a checkpoint of ``step`` was loaded."""
        self.step = step

    def get_loss_dict(
        self, outputs: Outputs, batch: dict[str, Any], metrics_dict: dict[str, Any] | None = None
    ) -> dict[str, Tensor]:
        """Losses of a batch of rays, the same on all ranks but for what only one of them can know.

        Summed over ranks, gradients are those of one process with all tiles: losses of rays reach private parameters on
        the rank that has them; the hash grids' decay is that of this rank's tiles; and what is a function of shared
        parameters alone counts on rank 0 only.
        """
        target = self._target(batch["image"].to(self.device), outputs)
        losses = {"rgb_loss": functional.mse_loss(outputs["rgb"], target)}
        if not self.training:
            return losses
        if self.config.distortion_loss_mult > 0:
            losses["distortion_loss"] = self.config.distortion_loss_mult * outputs["distortion"].mean()
        if self.config.hash_decay_mult > 0 and len(self.fields):
            losses["hash_decay"] = self.config.hash_decay_mult * self._hash_decay()
        if self.world.rank == 0:
            self.camera_optimizer.get_loss_dict(losses)
        return losses

    def _hash_decay(self) -> Tensor:
        """Sum over this rank's tiles and their levels of the mean squared entry."""
        parts = []
        for tile in self.held:
            grid = self._tile(tile)[0].field.grid
            sizes = [level.entries for level in grid.layout.levels]
            parts += [rows.square().mean() for rows in grid.table.split(sizes)]
        return torch.stack(parts).sum()

    def get_metrics_dict(self, outputs: Outputs, batch: dict[str, Any]) -> dict[str, Any]:
        """PSNR of a batch, and how far the camera optimizer has gone."""
        target = self._target(batch["image"].to(self.device), outputs)
        metrics = {"psnr": self.psnr(outputs["rgb"].detach(), target)}
        if "distortion" in outputs:
            metrics["distortion"] = outputs["distortion"].detach().mean()
        self.camera_optimizer.get_metrics_dict(metrics)
        return metrics

    def get_image_metrics_and_images(
        self, outputs: Outputs, batch: dict[str, Any]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """PSNR, SSIM and, where its weights can be had, LPIPS of an image; pictures of all outputs."""
        truth = self._target(batch["image"].to(self.device), outputs)
        rgb = outputs["rgb"].to(self.device).clamp(0, 1)
        pair = [picture.movedim(-1, 0)[None] for picture in (truth, rgb)]
        metrics = {"psnr": float(self.psnr(*pair)), "ssim": float(self.ssim(*pair)), "lpips": float(self.lpips(*pair))}
        accumulation = outputs["accumulation"]
        images = {
            "img": torch.cat([truth, rgb], dim=1),
            "accumulation": colormaps.apply_colormap(accumulation),
            "depth": colormaps.apply_depth_colormap(outputs["depth"], accumulation=accumulation),
            "tile": outputs["tile"],
        }
        return {name: value for name, value in metrics.items() if value == value}, images

    def _target(self, image: Tensor, outputs: Outputs) -> Tensor:
        """(..., 3) from (..., 3 or 4): transparent pixels show the background that ``outputs`` were rendered over."""
        if image.shape[-1] == 3:
            return image
        background = outputs["background"] if "background" in outputs else self._background(1)
        return image[..., :3] * image[..., 3:] + (1 - image[..., 3:]) * background

    # -------------------------------------------------------------------------------------------------- loading

    def get_extra_state(self) -> dict[str, Any]:
        """The tiles and the scene, for checkpoints."""
        return {"tiles": self._tiles.state_dict(), "scene": self.scene.state_dict()}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of :meth:`get_extra_state`."""
        self.scene = self.scene.with_state(state["scene"])
        self._set_tiles(Tiles.from_state_dict(state["tiles"]))

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Loads the tiles of this rank out of a checkpoint of any number of ranks.

        Raises:
            UserError: when the checkpoint is of another method, another capture or another number of tiles.
        """
        extra = state_dict.get("_extra_state")
        if not isinstance(extra, Mapping) or not {"tiles", "scene"} <= extra.keys():
            raise UserError("the checkpoint holds no tiles: it is of another method than nerfxl.")
        self.scene.check_same(extra["scene"])
        saved = len(extra["tiles"]["bounds"])
        if saved != len(self._tiles):
            raise UserError(
                f"the checkpoint has {saved} tiles, not {len(self._tiles)}. "
                f"Leave --pipeline.model.tiles out or set it to {saved}."
            )
        own = {name: value for name, value in state_dict.items() if self._is_own(name)}
        return super().load_state_dict(own, **kwargs)

    def _is_own(self, name: str) -> bool:
        """Whether an entry of a checkpoint belongs on this rank."""
        return tile_of(name) is None or tile_of(name) in self.held


def tile_of(name: str) -> int | None:
    """The tile that an entry of the model's state belongs to; None for those that all ranks share."""
    return int(name.split(".")[1]) if name.startswith("fields.") else None
