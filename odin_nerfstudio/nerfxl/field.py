"""The field of a tile and what all tiles share: nerfacto's architecture, cut where NeRF-XL cuts it.

Private to a tile are its hash grid and density network, so its capacity is its own; shared are the colour network and
the appearance of images, so that tiles agree on how a view looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from nerfstudio.field_components.activations import trunc_exp
from nerfstudio.utils.math import components_from_spherical_harmonics
from torch import Tensor, nn
from torch.nn import functional

from odin_nerfstudio.nerfxl.hash_grid import HashGrid, HashGridConfig

_SH_LEVELS = 4
_INITIAL_APPEARANCE = 0.01


@dataclass(frozen=True)
class TileFieldConfig:
    """The field of one tile; the defaults are nerfacto's."""

    grid: HashGridConfig = field(default_factory=HashGridConfig)
    """Size of the tile's hash grid."""
    hidden_dim: int = 64
    """Width of the density network's hidden layer."""
    geo_feat_dim: int = 15
    """Features of a position that the density network hands to the colour network; the same for all tiles."""
    average_init_density: float = 0.01
    """Density of an untrained field, per unit of the scene's length."""


@dataclass(frozen=True)
class SharedHeadConfig:
    """What all tiles share; the defaults are nerfacto's."""

    hidden_dim: int = 64
    """Width of the colour network's hidden layers."""
    hidden_layers: int = 2
    """Number of the colour network's hidden layers."""
    appearance_embed_dim: int = 32
    """Numbers that describe the appearance of a training image (exposure, weather); 0 for none."""
    use_average_appearance_embedding: bool = True
    """Whether views that are not training images get the mean appearance, or else zeros."""


class TileField(nn.Module):
    """Density and geometry features inside one tile.

    Args:
        config: sizes.
        generator: of the initial parameters; torch's global one if not given. With a generator of its own a tile begins
            alike wherever it lives.

    Raises:
        UserError: for a hash grid that no kernel can handle.
    """

    def __init__(self, config: TileFieldConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.grid = HashGrid(config.grid, generator)
        self.mlp = _mlp((self.grid.out_dim, config.hidden_dim, 1 + config.geo_feat_dim), generator)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluates the field.

        Args:
            positions: (N, 3) in the tile's unit cube; those outside have no meaning and must be masked by the caller.

        Returns:
            (N,) density, positive; its derivative is that of an exponential with a clamped exponent (nerfstudio's
            ``trunc_exp``). (N, ``geo_feat_dim``) geometry features.
        """
        # Short of the places where the grid's dense levels would join opposite faces of the tile.
        encoded = self.grid(positions * self.grid.layout.extent)
        log_density, geometry = self.mlp(encoded).split((1, self.config.geo_feat_dim), dim=-1)
        # In float32 under autocast: half precision ends at 65,504.
        density = self.config.average_init_density * trunc_exp(log_density.squeeze(-1).to(positions.dtype))
        return density, geometry


class SharedHead(nn.Module):
    """Colour from geometry features, direction and image.

    The first layer is split: its part that depends on the ray alone is computed once per ray, not once per sample.

    Args:
        config: sizes.
        geo_feat_dim: of the tiles' fields.
        num_images: number of training images.
        generator: of the initial parameters; torch's global one if not given.
    """

    def __init__(
        self,
        config: SharedHeadConfig,
        geo_feat_dim: int,
        num_images: int,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.appearance: nn.Embedding | None = None
        if config.appearance_embed_dim > 0:  # torch's CUDA backward of an embedding without columns reads wild memory
            self.appearance = nn.Embedding(num_images, config.appearance_embed_dim)
            # Nearly alike at first, so that the mean, which other views get, stays among them.
            self.appearance.weight.data.normal_(std=_INITIAL_APPEARANCE, generator=generator)
        ray_dim = _SH_LEVELS**2 + config.appearance_embed_dim
        fan_in = geo_feat_dim + ray_dim
        self.ray_layer = _linear(ray_dim, config.hidden_dim, generator, fan_in)
        self.geometry_layer = _linear(geo_feat_dim, config.hidden_dim, generator, fan_in, bias=False)
        self.mlp = _mlp((*[config.hidden_dim] * config.hidden_layers, 3), generator)

    def encode_rays(self, directions: Tensor, image_ids: Tensor | None) -> Tensor:
        """The part of a colour that all samples of a ray share.

        Args:
            directions: (R, 3) unit vectors.
            image_ids: (R,) int64 training image of each ray; ``None`` for views that are not training images.

        Returns:
            (R, ``hidden_dim``), for :meth:`forward`; differentiable with respect to the directions too.
        """
        harmonics = components_from_spherical_harmonics(_SH_LEVELS, directions).to(self.ray_layer.weight.dtype)
        if self.appearance is None:
            return self.ray_layer(harmonics)
        weight = self.appearance.weight
        if image_ids is not None:
            appearance = self.appearance(image_ids)
        elif self.config.use_average_appearance_embedding:
            appearance = weight.mean(dim=0).expand(len(directions), -1)
        else:
            appearance = weight.new_zeros(len(directions), weight.shape[1])
        return self.ray_layer(torch.cat((harmonics, appearance), dim=-1))

    def forward(self, geometry: Tensor, rays: Tensor, ray_ids: Tensor) -> Tensor:
        """Colours of samples.

        Args:
            geometry: (N, ``geo_feat_dim``) from :class:`TileField`.
            rays: (R, ``hidden_dim``) from :meth:`encode_rays`.
            ray_ids: (N,) int64 row of ``rays`` that each sample belongs to.

        Returns:
            (N, 3) in (0, 1).
        """
        hidden = self.geometry_layer(geometry) + rays.index_select(0, ray_ids)
        return torch.sigmoid(self.mlp(functional.relu(hidden, inplace=True)))


def _mlp(widths: Sequence[int], generator: torch.Generator | None) -> nn.Sequential:
    """Linear layers between these widths, with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [_linear(fan_in, fan_out, generator), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[:-1])


def _linear(
    in_dim: int, out_dim: int, generator: torch.Generator | None, fan_in: int | None = None, bias: bool = True
) -> nn.Linear:
    """A layer with torch's default initialisation, as part of a layer with ``fan_in`` inputs."""
    layer = nn.Linear(in_dim, out_dim, bias=bias)
    bound = (fan_in or in_dim) ** -0.5
    for parameter in layer.parameters():
        parameter.data.uniform_(-bound, bound, generator=generator)
    return layer
