"""Slow and obvious versions of what the package computes: explicit X, a decomposition each time."""

import torch

from coec.linalg.spd import root


def power(G, alpha):
    """`G^α`, as the factor of the tempered Gram has it; G itself where there is none."""
    factor = root(G, alpha)
    return G if factor is None else factor @ factor.T


def relative_error(W0, X, kept, W, bias=0.0):
    """`‖Y − W X_K − b‖² / ‖Y‖²` on the inputs themselves."""
    Y = W0 @ X
    out = W @ X[kept] + torch.as_tensor(bias, dtype=W.dtype).reshape(-1, 1)
    return float((Y - out).square().sum() / Y.square().sum())


def polar_by_svd(A):
    P, _, Qt = torch.linalg.svd(A, full_matrices=False)
    return P @ Qt


def rcpu(W0, X, kept):
    """The m×m Procrustes problem on the outputs, then the best scale."""
    Y, Z = W0 @ X, W0[:, kept] @ X[kept]
    Q = polar_by_svd(Y @ Z.T)
    rotated = Q @ Z
    return float((Y * rotated).sum() / rotated.square().sum()) * (Q @ W0[:, kept])


def global_scale(W, Gxx, Gyx):
    return float((Gyx * W).sum() / (W @ Gxx * W).sum())


def gcv_rescale(W, Gxx, Gyx, kappa=10.0):
    """METHODS §5.3 word for word, on a fresh SVD of W; full-rank statistics only."""
    U, s, Vt = torch.linalg.svd(W, full_matrices=False)
    rho = torch.stack([U[:, i] @ Gyx @ Vt[i] for i in range(len(s))])
    e = torch.stack([Vt[i] @ Gxx @ Vt[i] for i in range(len(s))])
    own, prior, M = rho / e, global_scale(W, Gxx, Gyx) * s, len(s)
    best = (float("inf"), None)
    for relative in torch.logspace(-4, 5, 120, dtype=torch.float64):
        lam = relative * e.median()
        shrunk = (rho + lam * prior) / (e + lam)
        freedom = (e / (e + lam)).sum()
        score = float((e * (shrunk - own) ** 2).sum() / (1 - freedom / M) ** 2)
        if score < best[0]:
            best = (score, shrunk)
    banded = torch.minimum(torch.maximum(best[1], prior / kappa), prior * kappa)
    return U @ torch.diag(banded) @ Vt


def literal_left_then_rescale(W, Gxx, Gyx):
    """The first two steps of the loop in the paper's own form: rotate Ŵ, decompose, rescale."""
    return gcv_rescale(polar_by_svd(Gyx @ W.T) @ W, Gxx, Gyx)


def right_objective(R, s, Gxx, C, yy):
    """The right problem at the optimal scale, differentiable in R."""
    quadratic = (s[:, None] ** 2 * (R @ Gxx) * R).sum()
    linear = (C * R).sum()
    t = linear / quadratic
    return (t**2 * quadratic - 2 * t * linear + yy) / yy


def of_unit_energy(W, G):
    """A weight and a Gram in units in which every channel has energy 1, or none."""
    norms = G.diagonal().clamp_min(0).sqrt()
    scale = torch.where(norms > 0, norms, 1.0)
    return W * norms, G / scale / scale[:, None]


def greedy_elimination(W, G, units, keep, ridge=1e-3, damping=0.1):
    """METHODS §3 word for word, on W itself, of channels of unit energy: the units that go, first
    to last."""
    width = W.shape[1] // units
    own = G.diagonal()
    A = torch.linalg.inv(G + (damping * own + ridge * own.mean()).diag())
    rest, order = list(range(units)), []

    def columns(g):
        return slice(g * width, (g + 1) * width)

    def cost(g):
        c = columns(g)
        return float(torch.trace(W[:, c] @ torch.linalg.inv(A[c, c]) @ W[:, c].T))

    while len(rest) > keep:
        g = min(reversed(rest), key=cost)
        c = columns(g)
        pivot = torch.linalg.inv(A[c, c])
        W, A = W - W[:, c] @ pivot @ A[c], A - A[:, c] @ pivot @ A[c]
        rest.remove(g)
        order.append(g)
    return order
