"""The fit of an engine step to measurements."""

from __future__ import annotations

import random

import pytest

from fourfold.rollout.engine_step import EngineStep, EngineStepFit

STEP = EngineStep(base=1.5e-3, per_sample=6e-6, per_context_token=1e-8)


def fit_points(*points: tuple[float, float]) -> EngineStep | None:
    """Fit an engine step to pairs of running samples and the seconds of a step."""
    fit = EngineStepFit()
    for samples, seconds in points:
        fit.add(seconds=1.0, tokens=samples / seconds, samples=samples)
    return fit.result()


def test_points_on_a_line_give_the_line() -> None:
    fitted = fit_points(*((n, 2e-3 + 9.4e-6 * n) for n in (1, 128, 512)))
    assert fitted is not None and fitted.base == pytest.approx(2e-3) and fitted.per_sample == pytest.approx(9.4e-6)
    assert fitted.per_context_token == 0


def test_no_term_is_negative() -> None:
    faster = fit_points((1, 3e-3), (100, 2.9e-3), (200, 2.8e-3))
    assert faster is not None and faster.per_sample == 0 and 2.8e-3 < faster.base < 3e-3
    steep = fit_points((10, 1e-3), (20, 4e-3))
    assert steep is not None and steep.base == 0 and 1e-4 < steep.per_sample < 2e-4


def test_points_with_about_the_same_number_of_samples_determine_no_line() -> None:
    assert fit_points((100, 1e-3)) is None
    assert fit_points((100, 1e-3), (101, 2e-3)) is None


def reports(fit: EngineStepFit, step: EngineStep, lengths: list[int], noise: random.Random) -> None:
    """Add intervals of a second of an engine that samples these lengths to the end."""
    seconds, tokens, tick, since = 0.0, 0, 0, (0, 0)
    while running := [length for length in lengths if length > tick]:
        samples, context = len(running), len(running) * (64 + tick)
        seconds += step.seconds(samples, context) * noise.gauss(1, 0.02)
        tokens, tick = tokens + samples, tick + 1
        if seconds >= 1:
            if since[0]:
                before, held = since
                fit.add(seconds=seconds, tokens=tokens, samples=(before + samples) / 2, context=(held + context) / 2)
            seconds, tokens, since = 0.0, 0, (samples, context)


def test_reports_of_an_engine_that_empties_give_its_step() -> None:
    fit, noise = EngineStepFit(memory=0.99), random.Random(1)
    for _ in range(4):
        reports(fit, STEP, [min(4096, 1 + int(noise.expovariate(1 / 768))) for _ in range(256)], noise)
    fitted = fit.result()
    assert fitted is not None
    for samples, context in ((16, 16 * 3000), (128, 128 * 2000), (256, 256 * 400), (512, 512 * 800)):
        assert fitted.seconds(samples, context) == pytest.approx(STEP.seconds(samples, context), rel=0.1)


def test_a_term_that_explains_only_noise_is_left_out() -> None:
    fit, noise = EngineStepFit(), random.Random(1)
    for _ in range(4):
        reports(fit, EngineStep(base=2e-3, per_sample=1e-5), [noise.randrange(1, 4096) for _ in range(256)], noise)
    fitted = fit.result()
    assert fitted is not None and fitted.per_context_token == 0
    assert fitted.base == pytest.approx(2e-3, rel=0.03) and fitted.per_sample == pytest.approx(1e-5, rel=0.1)


def test_reports_with_one_number_of_samples_give_none() -> None:
    fit = EngineStepFit()
    assert fit.result() is None
    for _ in range(10):
        fit.add(seconds=1.0, tokens=30_000, samples=100, context=50_000)
    assert fit.result() is None


def test_old_intervals_are_forgotten() -> None:
    fit = EngineStepFit(memory=0.5)
    for base in [5e-3] * 20 + [1e-3] * 20:
        for samples in (1, 200):
            fit.add(seconds=1.0, tokens=samples / (base + 1e-5 * samples), samples=samples)
    fitted = fit.result()
    assert fitted is not None and fitted.base == pytest.approx(1e-3, rel=0.01)
