"""Writes golden/*.npz: what gsplat 1.4.0 itself renders on a CUDA device, for the scenes of ``raster_scenes.GOLDEN``.

    python tests/splat/raster/make_golden.py [FOLDER]

Goes through gsplat's public ``rasterization``, not through our backends. Inputs are not stored: a scene is made anew,
identically, from its seed. Each archive has the image, the visible rows, and the gradient of the weighted sum of the
image (``Scene.upstream``) with respect to every parameter, in the units in which the model stores it.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from gsplat import rasterization

sys.path.append(str(Path(__file__).parent))

from raster_scenes import GOLDEN, PARAMETERS, Scene


def golden(scene: Scene) -> dict[str, np.ndarray]:
    rows, camera = scene.build()
    leaves = {name: getattr(rows, name).cuda().requires_grad_() for name in PARAMETERS}
    viewmat = camera.viewmat.cuda().requires_grad_()
    coefficients = torch.cat((leaves["features_dc"][:, None], leaves["features_rest"]), dim=1)
    rgbd, alpha, info = rasterization(
        means=leaves["means"],
        quats=leaves["quats"],
        scales=torch.exp(leaves["scales"]),
        opacities=torch.sigmoid(leaves["opacities"][:, 0]),
        colors=torch.sigmoid(leaves["features_dc"]) if scene.sh_degree is None else coefficients,
        viewmats=viewmat[None],
        Ks=camera.K[None].cuda(),
        width=scene.width,
        height=scene.height,
        near_plane=scene.settings.near,
        far_plane=scene.settings.far,
        sh_degree=scene.sh_degree,
        packed=False,
        absgrad=True,
        render_mode="RGB+ED",
        rasterize_mode=scene.mode,
    )
    image = (rgbd[0, ..., :3], alpha[0], rgbd[0, ..., 3:])
    sum((value * weight.cuda()).sum() for value, weight in zip(image, scene.upstream(), strict=True)).backward()

    visible = info["radii"][0] > 0
    values = dict(zip(("rgb", "alpha", "depth"), image, strict=True))
    values |= {"ids": rows.ids.cuda()[visible], "absgrad": info["means2d"].absgrad[0, visible]}
    values |= {f"grad_{n}": leaf.grad for n, leaf in leaves.items() if leaf.numel() and leaf.grad is not None}
    values["grad_viewmat"] = viewmat.grad[:3]
    return {name: value.detach().cpu().numpy() for name, value in values.items()}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "golden"
    folder.mkdir(parents=True, exist_ok=True)
    for name, scene in GOLDEN.items():
        values = golden(scene)
        np.savez_compressed(folder / f"{name}.npz", **values)
        print(f"{name}: {len(values['ids'])} of {scene.rows} visible, mean alpha {values['alpha'].mean():.3f}")
