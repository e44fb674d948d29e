"""An evaluation with numbers that are made up: three subjects, every part; as it is stored, and typed."""

from linearizer.run.results import read_part

NAMES = ["teacher", "student", "window"]
MADE = {
    "versions": {"torch": "2.13"},
    "device": "cpu",
    "dtype": "float32",
    "teacher": None,
    "alone": None,
    "kernels": "",
}
ON_TEXT = {"text": "builtin", "texts": 2, "length": 128, "seed": 0, "asked": {"made_with": MADE}, "beyond": False}


def estimate(mean):
    return {"mean": mean, "interval": [mean - 0.1, mean + 0.2]}


def predictions(name, loss):
    return {
        "name": name, "state_bytes": 262144, "loss": estimate(loss),
        "by_position": [loss + 0.1, loss - 0.1],
        "excess": estimate(0.1), "kl": estimate(0.2),
        "agreement": estimate(0.8), "calibration_error": 0.04,
        "tail": {"kl_99": 1.2345, "kl_999": 2.3456, "probability_change": 0.0321},
    }  # fmt: skip


def at_length(length, difference=(-0.1, -0.12, -0.08), names=NAMES):
    mean, *interval = difference
    subjects = [{"name": name, "loss": estimate(3.4), "kl": estimate(0.2), "agreement": estimate(0.8),
                 "catastrophic": None} for name in names]  # fmt: skip
    return {"length": length, "drawn": "texts", "count": 2, "window": 20, "subjects": subjects,
            "difference": {"mean": mean, "interval": interval}, "strained": False}  # fmt: skip


def paces(name):
    predicted = {"predicted_bytes": 4000 if name == "teacher" else 500, "predicted_operations": 7}
    measured = {"batch": 1, "read_rate": 900.0, "write_rate": 90.0, "peak_bytes": 2000, "state_bytes": 1000}
    later = {key: None for key in measured} | {"batch": 1}
    rows = [{"length": 1024, **measured, **predicted, "extrapolated": None},
           {"length": 4096, **later, **predicted, "extrapolated": "memory"}]  # fmt: skip
    return {"name": name, "paces": rows, "batched": [{**rows[0], "batch": 4}]}


def written(name, sampled, after):
    return {
        "name": name, "sampled": sampled, "diverged": after, "repeated": 0.3, "distinct": [0.2, 0.5, 0.7],
        "loss": 1.5, "likeliest": 0.9,
    }  # fmt: skip


def scored(name, value):
    scores = [{"task": "piqa", "metric": metric, "value": value, "error": 0.02, "samples": 100}
              for metric in ("acc_norm", "acc")]  # fmt: skip
    return {"name": name, "scores": scores, "accuracy": value}


LANGUAGE = {
    **ON_TEXT, "tokens": 254, "edges": [0, 64], "drawn": "texts", "count": 2,
    "subjects": [predictions(name, 3.4 + 0.1 * place) for place, name in enumerate(NAMES)],
    "lengths": [at_length(32), at_length(128)],
}  # fmt: skip
RECALL = {
    **ON_TEXT, "passage": 8, "gaps": [16, 32],
    "subjects": [{"name": name, "first": [4.0, 5.0], "second": [2.5, 3.0]} for name in NAMES],
}  # fmt: skip
NEEDLE = {
    **ON_TEXT, "lengths": [160, 320], "depths": [0.05, 0.95], "extrapolated": [False, True],
    "subjects": [{"name": name, "correct": [[0.25, 1.0], [None, None]], "loss": [[1.0, 0.1], [None, None]],
                  "surprise": [[8.0, 8.1], [None, None]]} for name in NAMES],
}  # fmt: skip
GENERATION = {
    **ON_TEXT, "prompts": 2, "prompt_tokens": 16, "new_tokens": 16,
    "subjects": [written(name, sampled, [16, 16] if name == "teacher" else [3, 8])
                 for sampled in (False, True) for name in NAMES],
}  # fmt: skip
SPEED = {
    "asked": {"made_with": MADE}, "lengths": [1024, 4096], "beyond": [False, True], "seconds": 1.0,
    "subjects": [paces(name) for name in NAMES],
    "breakeven": {"predicted_bytes": 64, "predicted_operations": 80, "writing": None},
}  # fmt: skip
TASKS = {
    "asked": {"made_with": MADE}, "tasks": ["piqa"], "limit": 100, "few_shot": None,
    "subjects": [scored(name, 0.7) for name in NAMES],
}  # fmt: skip
STORED = {
    "language": LANGUAGE, "recall": RECALL, "needle": NEEDLE, "generation": GENERATION,
    "speed": SPEED, "tasks": TASKS,
}  # fmt: skip
TYPED = {name: read_part(name, plain) for name, plain in STORED.items()}
