"""Makes the numbers of `pallasite/ops/polynomials.py`; run it to print that file.

Each function is computed with 60 decimal digits at Chebyshev points, interpolated, and
then fitted by the Remez exchange (weighted, so that the error is relative to the final
result) in 64-bit-mantissa arithmetic. Not a test; nothing in the package imports it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal as D
from decimal import getcontext

import numpy as np

getcontext().prec = 60
L = np.longdouble
EPS = D(10) ** -58

# --- functions with 60 digits ---


def series(first: D, ratio: Callable[[int], D]) -> D:
    """first * (1 + r(1) + r(1) r(2) + ...)."""
    total = term = first
    k = 1
    while abs(term) > EPS * abs(total) * D("1e-3") and k < 3000:
        term *= ratio(k)
        total += term
        k += 1
    return total


def sin_tail(z: D) -> D:  # (sin r - r) / r^3, z = r^2
    return series(D(-1) / 6, lambda k: -z / ((2 * k + 2) * (2 * k + 3)))


def cos_tail(z: D) -> D:  # (cos r - 1 + z/2) / z^2
    return series(D(1) / 24, lambda k: -z / ((2 * k + 3) * (2 * k + 4)))


def sinh_tail(z: D) -> D:
    return series(D(1) / 6, lambda k: z / ((2 * k + 2) * (2 * k + 3)))


def exp_tail(r: D) -> D:  # (exp r - 1 - r) / r^2
    return series(D(1) / 2, lambda k: r / (k + 2))


def log_tail(f: D) -> D:  # (log(1+f) - f + f^2/2) / f^3
    total, term, k = D(0), D(1), 3
    while abs(term) > EPS:
        total += term / k
        term *= -f
        k += 1
    return total


def atanh_tail(z: D) -> D:  # (2 atanh(s)/s - 2) / z, z = s^2
    total, term, k = D(0), D(2), 3
    while abs(term) > EPS:
        total += term / k
        term *= z
        k += 2
    return total


def atan_tail(z: D) -> D:  # (atan(t)/t - 1) / z, z = t^2
    return -atanh_tail(-z) / 2


def asin_tail(z: D) -> D:  # (asin(t)/t - 1) / z, z = t^2
    total, term, k = D(0), D(1) / 2, 1
    while abs(term) > EPS:
        total += term / (2 * k + 1)
        term *= z * (2 * k + 1) / (2 * k + 2)
        k += 1
    return total


PI = D("3.14159265358979323846264338327950288419716939937510582097494459")
PI_L = L(str(PI))
LN2 = D(2).ln()


def erf_head(z: D) -> D:  # erf(x)/x, z = x^2
    total, term, k = D(0), D(1), 0
    while abs(term) > EPS:
        total += term / (2 * k + 1)
        k += 1
        term *= -z / k
    return 2 / PI.sqrt() * total


def erfcx(x: D) -> D:
    """exp(x^2) erfc(x): by the erf series for small x, a continued fraction else."""
    if x < 4:
        # exp(x^2) erf(x) = 2x/sqrt(pi) * sum (2 x^2)^k / (2k+1)!!, all terms positive
        total = series(2 * x / PI.sqrt(), lambda k: 2 * x * x / (2 * k + 1))
        getcontext().prec = 60
        return (x * x).exp() - total
    fraction = x
    for k in range(800, 0, -1):
        fraction = x + D(k) / 2 / fraction
    return 1 / (PI.sqrt() * fraction)


def erf_inv(x: D) -> D:
    """Newton from a double."""
    from statistics import NormalDist

    p = float((1 - x) / 2)
    y = -D(NormalDist().inv_cdf(p)) / D(2).sqrt()
    for _ in range(4):
        if y < D("0.5"):
            error = y * erf_head(y * y) - x
        else:
            error = (1 - x) - erfcx(y) * (-y * y).exp()
        y -= error * PI.sqrt() / 2 * (y * y).exp()
    return y


BERNOULLI = [
    (1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6),
    (-3617, 510), (43867, 798), (-174611, 330), (854513, 138),
    (-236364091, 2730), (8553103, 6), (-23749461029, 870),
]  # fmt: skip


def stirling_tail(w: D) -> D:
    """(lgamma(x) - (x-1/2) log x + x - log(2 pi)/2) * x, w = 1/x^2."""
    if not w:
        return D(1) / 12
    x = 1 / w.sqrt()
    # Shift upwards until the asymptotic series has 50 digits.
    shift = max(0, 60 - int(x))
    product = D(1)
    for k in range(shift):
        product *= x + k
    big = x + shift
    value = (big - D("0.5")) * big.ln() - big
    for n, (a, b) in enumerate(BERNOULLI, 1):
        value += D(a) / b / (2 * n * (2 * n - 1)) / big ** (2 * n - 1)
    value -= product.ln()
    return (value - ((x - D("0.5")) * x.ln() - x)) * x


def lgamma_head(d: D) -> D:  # lgamma(2 + d) / d
    if abs(d) < D("1e-20"):
        return 1 - D("0.57721566490153286060651209008240243104215933593992")
    x = 2 + d
    tail = stirling_tail(1 / (x * x)) / x
    half_log_2pi = (2 * PI).ln() / 2
    return ((x - D("0.5")) * x.ln() - x + half_log_2pi + tail) / d


# --- Remez ---


def solve(matrix: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    """Gaussian elimination with pivoting (numpy's own works in 53 bits only)."""
    a = np.concatenate([matrix, rhs[:, None]], 1)
    n = len(rhs)
    for i in range(n):
        p = i + int(np.argmax(np.abs(a[i:, i])))
        a[[i, p]] = a[[p, i]]
        a[i] /= a[i, i]
        for j in range(n):
            if j != i:
                a[j] -= a[j, i] * a[i]
    return a[:, -1]


def chebyshev_values(angle: np.ndarray, degree: int) -> np.ndarray:
    """T_0 to T_degree at cos(angle)."""
    return np.cos(angle[:, None] * np.arange(degree + 1))


@dataclass
class Interpolant:
    """A function on [low, high], from its values at Chebyshev points."""

    fn: Callable[[D], D]
    low: float
    high: float
    points: int = 48

    def __post_init__(self):
        angle = (2 * np.arange(self.points) + 1) * (PI_L / (2 * self.points))
        half = (D(self.high) - D(self.low)) / 2
        x = [(D(str(np.cos(a))) + 1) * half + D(self.low) for a in angle]
        values = np.array([L(str(self.fn(v))) for v in x])
        t = chebyshev_values(angle, self.points - 1)
        self.coefficients = 2 * (t.T @ values) / self.points
        self.coefficients[0] /= 2

    def __call__(self, angle: np.ndarray) -> np.ndarray:
        return chebyshev_values(angle, self.points - 1) @ self.coefficients


def remez(fn, low, high, degree, weight) -> tuple[list[float], float]:
    """Coefficients, lowest first, and the largest weighted error."""
    target = Interpolant(fn, low, high)
    grid = np.arange(6001) * (PI_L / 6000)
    x = (np.cos(grid) + 1) / 2 * (L(high) - L(low)) + L(low)
    weights = np.abs(weight(x))
    used = weights > L(1e-8) * weights.max()  # the error cannot peak where it is 0
    grid, weights = grid[used], weights[used]
    values, basis = target(grid), chebyshev_values(grid, degree)
    lawson = np.ones_like(values)
    c = np.zeros(degree + 1, L)
    for _ in range(12):  # a first guess: least squares with growing weights
        scaled = basis * (lawson * weights**2)[:, None]
        c = solve(scaled.T @ basis, scaled.T @ values)
        error = np.abs((basis @ c - values) * weights)
        lawson = lawson * (error / error.max() + L(1e-3))
    signs = (-1.0) ** np.arange(degree + 2)
    picks = None
    for _ in range(40):
        new = extrema((basis @ c - values) * weights, degree + 2)
        if new is None or (picks is not None and np.array_equal(new, picks)):
            break
        picks = new
        matrix = np.concatenate([basis[picks], (signs / weights[picks])[:, None]], 1)
        c = solve(matrix.astype(L), values[picks])[:-1]
    worst = float(np.abs((basis @ c - values) * weights).max())
    return monomial(c, low, high), worst


def extrema(error: np.ndarray, count: int) -> np.ndarray | None:
    """The largest point of each stretch of one sign, `count` of them, alternating."""
    sign = np.where(error < 0, -1, 1)
    edges = np.flatnonzero(sign[1:] != sign[:-1]) + 1
    parts = np.split(np.arange(len(error)), edges)
    best = [p[np.argmax(np.abs(error[p]))] for p in parts]
    while len(best) > count:
        sizes = np.abs(error[best])
        weakest = int(np.argmin(sizes))
        if weakest in (0, len(best) - 1) or len(best) == count + 1:
            weakest = 0 if sizes[0] < sizes[-1] else len(best) - 1
            del best[weakest]
        else:  # two neighbours of one sign remain: keep the larger
            other = weakest + (1 if sizes[weakest + 1] < sizes[weakest - 1] else -1)
            for k in sorted((weakest, other), reverse=True):
                del best[k]
    return np.array(best) if len(best) == count else None


def monomial(c: np.ndarray, low: float, high: float) -> list[float]:
    """Chebyshev coefficients on [low, high] to powers of x."""
    scale, shift = 2 / (L(high) - L(low)), -(L(high) + L(low)) / (L(high) - L(low))

    def times_u(p: np.ndarray) -> np.ndarray:
        return np.append(p * shift, L(0)) + np.append(L(0), p * scale)

    older, newer = np.array([L(1)]), times_u(np.array([L(1)]))
    total = np.zeros(len(c), L)
    total[0] += c[0]
    if len(c) > 1:
        total[:2] += c[1] * newer
    for k in range(2, len(c)):
        twice = 2 * times_u(newer)
        twice[: len(older)] -= older
        older, newer = newer, twice
        total[: k + 1] += c[k] * newer
    return list(total)


# --- the table ---


def tanh_tail(z: D) -> D:  # (tanh(x)/x - 1) / z, z = x^2
    x = z.sqrt()
    e = (2 * x).exp()
    return ((e - 1) / (e + 1) / x - 1) / z


def log_erfc(a: D) -> D:
    return erfcx(a).ln() - a * a


def erf_inv_head(w: D) -> D:  # erf_inv(x)/x, w = -log(1 - x^2)
    x = (1 - (-w).exp()).sqrt()
    return erf_inv(x) / x


def erfcx_folded(t: D) -> D:
    """(1 + 2a) erfcx(a), all a >= 0 folded into t = (a - 3)/(a + 3) < 1."""
    a = 3 * (1 + t) / (1 - t)
    return (1 + 2 * a) * erfcx(a)


def one(x: np.ndarray) -> np.ndarray:
    return np.ones_like(x)


def same(x: np.ndarray) -> np.ndarray:
    return x


def erfc_weight(a: np.ndarray) -> np.ndarray:
    from scipy.special import erfc

    return erfc(a.astype(np.float64)).astype(L)


def log_weight(f: np.ndarray) -> np.ndarray:
    return f**3 / np.where(f == 0, 1, np.log1p(f))


HALF_LN2 = 0.3501  # a little more than log(2)/2
QUARTER_PI_SQUARED = 0.6225  # a little more than (pi/4)^2
SQRT_HALF, SQRT_TWO = 0.5**0.5 - 1 - 1e-7, 2**0.5 - 1 + 1e-7
TAN_PI_8_SQUARED = 0.1733

# name: what it approximates, function, weight, {dtype: (low, high, degree)}
ROWS = {
    "EXP_TAIL": (
        "(exp(r) - 1 - r) / r^2",
        exp_tail,
        lambda r: r * r / np.exp(r),
        {"f32": (-HALF_LN2, HALF_LN2, 4), "f64": (-HALF_LN2, HALF_LN2, 9)},
    ),
    "LOG_TAIL": (
        "(log(1 + f) - f + f^2/2) / f^3",
        log_tail,
        log_weight,
        {"f32": (SQRT_HALF, SQRT_TWO, 7)},
    ),
    "ATANH_TAIL": (
        "(2 atanh(s)/s - 2) / z, z = s^2",
        atanh_tail,
        lambda z: z / 2,
        {"f32": (0, 0.0296, 2), "f64": (0, 0.0296, 6)},
    ),
    "SIN_TAIL": (
        "(sin(r) - r) / r^3 in r^2",
        sin_tail,
        same,
        {"f32": (0, QUARTER_PI_SQUARED, 2), "f64": (0, QUARTER_PI_SQUARED, 5)},
    ),
    "COS_TAIL": (
        "(cos(r) - 1 + r^2/2) / r^4 in r^2",
        cos_tail,
        lambda z: z * z,
        {"f32": (0, QUARTER_PI_SQUARED, 2), "f64": (0, QUARTER_PI_SQUARED, 5)},
    ),
    "SINH_TAIL": (
        "(sinh(x) - x) / x^3 in x^2",
        sinh_tail,
        same,
        {"f32": (0, 1, 3), "f64": (0, 1, 6)},
    ),
    "TANH_TAIL": (
        "(tanh(x) - x) / x^3 in x^2",
        tanh_tail,
        same,
        {"f32": (0, 0.55**2, 4), "f64": (0, 0.55**2, 10)},
    ),
    "ATAN_TAIL": (
        "(atan(t) - t) / t^3 in t^2",
        atan_tail,
        same,
        {"f32": (0, TAN_PI_8_SQUARED, 4), "f64": (0, TAN_PI_8_SQUARED, 10)},
    ),
    "ASIN_TAIL": (
        "(asin(t) - t) / t^3 in t^2",
        asin_tail,
        same,
        {"f32": (0, 0.2501, 4), "f64": (0, 0.2501, 12)},
    ),
    "ERF_HEAD": (
        "erf(x)/x - 1 in x^2",
        lambda z: erf_head(z) - 1,
        one,
        {"f32": (0, 0.875**2, 6), "f64": (0, 0.875**2, 11)},
    ),
    "LOG_ERFC": (
        "log(erfc(a))",
        log_erfc,
        erfc_weight,
        {"f32": (0.87, 4.0, 7)},
    ),
    "ERFCX": (
        "(1 + 2a) exp(a^2) erfc(a) in t = (a - 3)/(a + 3)",
        erfcx_folded,
        one,
        {"f32": (-1, 0.56, 10), "f64": (-1, 0.806, 24)},
    ),
    "ERF_INV_HEAD": (
        "erf_inv(x)/x in w - 2.5, w = -log(1 - x^2)",
        lambda u: erf_inv_head(u + D("2.5")),
        one,
        {"f32": (-2.5 + 1e-5, 2.5, 10), "f64": (-2.5 + 1e-5, 2.5, 10)},
    ),
    "ERF_INV_TAIL": (
        "erf_inv(x)/x in sqrt(w) - 3",
        lambda u: erf_inv_head((u + 3) ** 2),
        one,
        {"f32": (5**0.5 - 3, 1.05, 9), "f64": (5**0.5 - 3, 3.2, 12)},
    ),
    "LGAMMA_HEAD": (
        "lgamma(2 + d)/d",
        lgamma_head,
        one,
        {"f32": (-0.5, 0.5, 8), "f64": (-0.5, 0.5, 18)},
    ),
    "STIRLING_TAIL": (
        "x (lgamma(x) - (x - 1/2) log(x) + x - log(2 pi)/2) in 1/x^2",
        stirling_tail,
        lambda w: np.sqrt(w) / 8,
        {"f32": (0, 1 / 49, 1), "f64": (0, 1 / 49, 5)},
    ),
}

HEADER = '''"""Coefficients of the decompositions, lowest power first, by element type.

Printed by `tests/ops/fit_polynomials.py`: Remez exchange on values with 60 digits,
weighted so that the stated error is relative to the finished function. Do not edit by
hand. `decompose_*.py` use them.
"""

Coefficients = dict[str, tuple[float, ...]]
'''


def main() -> None:
    print(HEADER)
    for name, (what, fn, weight, fits) in ROWS.items():
        print(f"# {what}")
        bodies = []
        for dtype, (low, high, degree) in fits.items():
            c, error = remez(fn, low, high, degree, weight)
            kind = np.float32 if dtype == "f32" else np.float64
            print(f"# {dtype}: {low:.4g} to {high:.4g}, error 2^{np.log2(error):.1f}")
            numbers = ", ".join(str(kind(v)) for v in c)
            bodies.append(f'"{dtype}": ({numbers},)')
        print(f"{name}: Coefficients = {{{', '.join(bodies)},}}\n")


if __name__ == "__main__":
    main()
