#!/usr/bin/env python3
"""Derives the polynomials of `zofo_hal::perturb::normal` (needs numpy, scipy, mpmath).

    neg2log(f) = -2 log(1 + f) = f * (L0 + f * (L1 + ...)),     f in [-1/3, 1/3], relative error
    sin(v * pi/2)              = v * (S0 + v^2 * (S1 + ...)),   v in [-1/2, 1/2], relative error
    cos(v * pi/2)              = C0 + v^2 * (C1 + ...),         v in [-1/2, 1/2], absolute error

Each fit is a discrete weighted minimax (a linear program over Chebyshev points, solved for the residual of a 50-digit interpolation).
Coefficients are rounded to f32 one at a time from the lowest degree up and the rest refitted, so that later ones make good what earlier
roundings lost.
"""
import mpmath as mp
import numpy as np
from scipy.optimize import linprog

mp.mp.dps = 50


def f32(x):
    return mp.mpf(float(np.float32(float(x))))


def minimax(target, weight, degree, fixed, lo, hi):
    """Coefficients c_0 .. c_degree with least max |weight(x) (target(x) - sum c_i x^i)| on [lo, hi], those in `fixed` given."""
    free = [p for p in range(degree + 1) if p not in fixed]
    xs = [lo + (hi - lo) * (1 - mp.cos(mp.pi * (i + mp.mpf("0.5")) / 400)) / 2 for i in range(400)]
    # Start: interpolation at Chebyshev points of what the fixed coefficients leave, so that the program sees small numbers.
    n, k = len(free), min(free)
    at = [lo + (hi - lo) * (1 - mp.cos(mp.pi * (i + mp.mpf("0.45")) / n)) / 2 for i in range(n)]
    left = lambda x, c: target(x) - sum(v * x**p for p, v in c.items())
    start = mp.lu_solve(mp.matrix([[x**p for p in free] for x in at]), mp.matrix([left(x, fixed) for x in at]))
    c = dict(fixed) | dict(zip(free, start))
    scale, span = mp.mpf(10) ** 8, max(abs(lo), abs(hi))
    rows, bounds = [], []
    for x in xs:
        row = [float(weight(x) * (x / span) ** p) for p in free]
        e = float(scale * weight(x) * left(x, c))
        rows += [row + [-1.0], [-r for r in row] + [-1.0]]
        bounds += [e, -e]
    lp = linprog([0.0] * n + [1.0], A_ub=rows, b_ub=bounds, bounds=[(None, None)] * n + [(0, None)], method="highs")
    assert lp.status == 0, lp.message
    return c | {p: c[p] + mp.mpf(float(d)) / scale / span**p for p, d in zip(free, lp.x[:-1])}


def fit(name, target, weight, degree, fixed, lo, hi):
    fixed = dict(fixed)
    for p in range(degree + 1):
        if p not in fixed:
            fixed[p] = f32(minimax(target, weight, degree, fixed, lo, hi)[p])
    grid = [lo + (hi - lo) * i / 2000 for i in range(2001)]
    err = max(abs(weight(x) * (target(x) - sum(c * x**p for p, c in fixed.items()))) for x in grid)
    print(f"{name}: error of the rounded polynomial {mp.nstr(err, 3)} = 2^{mp.nstr(mp.log(err, 2), 4)}")
    for p in range(degree + 1):
        v = np.float32(float(fixed[p]))
        print(f"    {p}: {float(v)!r:>26}  0x{v.view(np.uint32):08x}")


third, quarter, one = mp.mpf(1) / 3, mp.mpf(1) / 4, mp.mpf(1)
neg2log = lambda f: -2 * mp.log1p(f) / f if f else mp.mpf(-2)
sin = lambda w: mp.sin(mp.sqrt(w) * mp.pi / 2) / mp.sqrt(w) if w else mp.pi / 2
cos = lambda w: mp.cos(mp.sqrt(w) * mp.pi / 2)
fit("NEG_2_LOG: -2 log(1 + f) / f in f", neg2log, lambda f: 1 / neg2log(f), 8, {0: mp.mpf(-2)}, -third, third)
fit("SIN: sin(v pi/2) / v in v^2", sin, lambda w: 1 / sin(w), 3, {}, 0 * one, quarter)
fit("COS: cos(v pi/2) in v^2", cos, lambda w: one, 3, {0: one}, 0 * one, quarter)
