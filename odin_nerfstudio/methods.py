"""The methods that ``ns-train`` offers once this package is installed.

nerfstudio imports this at the start of every ``ns-*`` command: keep the imports light and unable to fail.
"""

from __future__ import annotations

from nerfstudio.engine.optimizers import AdamOptimizerConfig
from nerfstudio.engine.schedulers import ExponentialDecaySchedulerConfig
from nerfstudio.plugins.types import MethodSpecification

from odin_nerfstudio.nerfxl.trainer import FusedAdamConfig, NerfXLTrainerConfig
from odin_nerfstudio.splat.trainer import LazyAdamConfig, OdinTrainerConfig

odin_splatfacto = MethodSpecification(
    config=OdinTrainerConfig(
        method_name="odin-splatfacto",
        steps_per_eval_batch=0,
        steps_per_eval_image=100,
        steps_per_eval_all_images=1000,
        steps_per_save=2000,
        max_num_iterations=30_000,
        mixed_precision=False,
        vis="viewer",
        optimizers={  # the learning rates are splatfacto's
            "means": {
                "optimizer": LazyAdamConfig(lr=1.6e-4),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1.6e-6, max_steps=30_000),
            },
            "features_dc": {"optimizer": LazyAdamConfig(lr=2.5e-3), "scheduler": None},
            "features_rest": {"optimizer": LazyAdamConfig(lr=2.5e-3 / 20), "scheduler": None},
            "opacities": {"optimizer": LazyAdamConfig(lr=0.05), "scheduler": None},
            "scales": {"optimizer": LazyAdamConfig(lr=5e-3), "scheduler": None},
            "quats": {"optimizer": LazyAdamConfig(lr=1e-3), "scheduler": None},
            "camera_opt": {
                "optimizer": AdamOptimizerConfig(lr=1e-4, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(
                    lr_final=5e-7, max_steps=30_000, warmup_steps=1000, lr_pre_warmup=0
                ),
            },
            "bilateral_grid": {
                "optimizer": AdamOptimizerConfig(lr=2e-3, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(
                    lr_final=1e-4, max_steps=30_000, warmup_steps=1000, lr_pre_warmup=0
                ),
            },
        },
    ),
    description="Gaussian splatting with Odin's primitive-level synchronisation (arXiv 2607.19893).",
)

nerfxl = MethodSpecification(
    config=NerfXLTrainerConfig(
        method_name="nerfxl",
        steps_per_eval_batch=500,
        steps_per_eval_image=500,
        steps_per_eval_all_images=25_000,
        steps_per_save=2000,
        max_num_iterations=30_000,
        mixed_precision=False,
        vis="viewer",
        optimizers={
            "fields": {
                "optimizer": FusedAdamConfig(lr=1e-2),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=30_000),
            },
            "head": {
                "optimizer": FusedAdamConfig(lr=1e-2),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=30_000),
            },
            "camera_opt": {
                "optimizer": AdamOptimizerConfig(lr=1e-3, eps=1e-15),
                "scheduler": ExponentialDecaySchedulerConfig(lr_final=1e-4, max_steps=5_000),
            },
        },
    ),
    description="NeRF-XL: one radiance field in tiles, trained jointly and exactly over many ranks (arXiv 2404.16221).",
)
