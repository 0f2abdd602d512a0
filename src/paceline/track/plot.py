"""The loss curve as a picture."""

from pathlib import Path

from paceline.track.jsonl import losses


def loss_curve(log: Path, picture: Path, unigram: float | None = None) -> Path | None:
    """Draws training and evaluation loss of a run log to a PNG; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    for kind, label, style in (("step", "training", "-"), ("eval", "evaluation", "o-")):
        points = sorted(losses(log, kind).items())
        if points:
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label, linewidth=1.2)
    if unigram is not None:
        axes.axhline(unigram, color="grey", linestyle="--", linewidth=1, label=f"unigram entropy {unigram:.2f}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(picture)
    pyplot.close(figure)
    return picture
