"""The schema of every operator, forward and backward.

Kernels live in `cuda_ext/cpu`, `cuda_ext/cuda` and `cuda_ext/resample.cpp`; each source file registers its kernels at the end.
Fake kernels and autograd live in `san/ops/library.py`, definitions in `san/ops/reference.py` and `fused_reference.py`. The
schemas are defined in Python, so that any part of the extension can be missing, and FLOPs can be counted without the extension.
"""

from __future__ import annotations

import functools
import re

import torch

# Shapes: N batch, C channels, R relation channels, G weight channels, H W map, P = H * W, K = kernel_size^2.
SCHEMAS = """
# x [N, C, H, W] -> the reflected footprint of every pixel [N, C, K, P]
unfold(Tensor x, int kernel_size) -> Tensor
unfold_backward(Tensor grad, int height, int width, int kernel_size) -> Tensor
# phi, psi [N, R, H, W] -> phi_i - psi_j [N, R, K, P]
subtraction(Tensor phi, Tensor psi, int kernel_size) -> Tensor
subtraction_backward(Tensor grad, int height, int width, int kernel_size) -> (Tensor, Tensor)
# phi, psi [N, R, H, W] -> sum over the channels c of group c % G of phi_i * psi_j [N, G, K, P], G = groups
dot(Tensor phi, Tensor psi, int kernel_size, int groups) -> Tensor
dot_backward(Tensor grad, Tensor phi, Tensor psi, int kernel_size) -> (Tensor, Tensor)
# beta [N, C, H, W], weight [N, G, K, P] -> sum_j weight_{c % G, j} beta_{c, j} [N, C, H, W]
aggregation(Tensor beta, Tensor weight, int kernel_size) -> Tensor
aggregation_backward(Tensor grad, Tensor beta, Tensor weight, int kernel_size) -> (Tensor, Tensor)

# Fused operators contain no BatchNorm, but take its affine form: rows mean, scale, shift of (x - mean) * scale + shift, where
# scale = weight / sqrt(var + eps) and shift = bias. mean, var [c] float32 or float64; weight and bias [c] of any type
# -> [3, c] of mean's type
norm_affine(Tensor mean, Tensor var, Tensor weight, Tensor bias, float eps) -> Tensor
# -> gradients of mean, var, weight, bias, all of mean's type
norm_affine_backward(Tensor grad, Tensor var, Tensor weight, float eps) -> (Tensor, Tensor, Tensor, Tensor)
# Moves running statistics [c], float32 or float64, by `momentum` towards the mean and biased variance of a batch with `values`
# values per channel, as BatchNorm does, and counts the batch
track_statistics(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!) batches, Tensor mean, Tensor var, int values,
    float momentum) -> ()

# Maps are channels-last, [N, H, W, channels]. Maps and norms are float32 or float64; weights may be half types too. With `tf32`
# a GPU may round the factors of float32 products to TF32, as torch's setting for matrix products allows; products of half types
# it may compute so in any case.
#
# Pairs (i, j) of a pixel and a position of its footprint. center, around [N, H, W, d]:
# delta = center_i * around_j in the first `products` channels, center_i - around_j in the others. On GPUs, `products` is 0,
# maps are float32, and there is a hidden layer.
# -> the mean and biased variance of delta over all pairs, [d] each
pair_statistics(Tensor center, Tensor around, int kernel_size, int products) -> (Tensor mean, Tensor var)
# -> gradients of center, around
pair_statistics_backward(Tensor grad_mean, Tensor grad_var, Tensor center, Tensor around, Tensor mean, int kernel_size,
    int products) -> (Tensor, Tensor)
# a1 = relu(norm(delta)), with the affine form `norm` [3, d]
# -> its mean [d] and biased covariance [d, d] over all pairs. On CPUs only
pair_covariance(Tensor center, Tensor around, Tensor norm, int kernel_size, int products) -> (Tensor mean, Tensor covariance)
# -> gradients of center, around, norm
pair_covariance_backward(Tensor grad_mean, Tensor grad_covariance, Tensor center, Tensor around, Tensor norm, Tensor mean,
    int kernel_size, int products) -> (Tensor, Tensor, Tensor)
# y [N, H, W, M]: the weighted sum of beta [N, H, W, M], whose channel c uses weight channel c % G. The weights are the softmax
# over the footprint of weight2 relu(weight1 a1 + shift2), weight1 [E, d], weight2 [G, E]; if weight1 is empty, there is no
# hidden layer: the softmax of weight2 a1, weight2 [G, d]. On CPUs, all have one type; on GPUs, weights and beta may be half
# types, and at most 8 value channels may share a weight channel. The weights are not stored, but computed again for the
# gradients, from each pixel's largest logit (on GPUs, a number near it) and the reciprocal of the sum of
# exp(logit - largest): softmax [N, 2, G, P]
attend_pairs(Tensor center, Tensor around, Tensor norm, Tensor weight1, Tensor shift2, Tensor weight2, Tensor beta,
    int kernel_size, int products, bool tf32) -> (Tensor, Tensor softmax)
# -> gradients of center, around, norm, weight1, shift2, weight2, beta; only GPUs read y, on CPUs any such map will do
attend_pairs_backward(Tensor grad, Tensor y, Tensor softmax, Tensor center, Tensor around, Tensor norm, Tensor weight1,
    Tensor shift2, Tensor weight2, Tensor beta, int kernel_size, int products, bool tf32) -> (Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor)
# The same on GPUs for differences only, with the second norm inside, by the statistics of the batch: h = weight1 a1, and the
# softmax of weight2 relu((h - mean) / sqrt(var + eps) * norm_weight + norm_bias), all float32; only beta may be a half type
# -> y; mean and biased variance of h over all pairs, [E] each; softmax; mean [d] and covariance [d, d] of a1
attend_pairs_of_batch(Tensor center, Tensor around, Tensor norm, Tensor weight1, Tensor norm_weight, Tensor norm_bias,
    Tensor weight2, Tensor beta, int kernel_size, bool tf32, float eps) -> (Tensor, Tensor mean, Tensor var,
    Tensor softmax, Tensor input_mean, Tensor covariance)
# -> gradients of center, around, norm, weight1, norm_weight, norm_bias, weight2, beta
attend_pairs_of_batch_backward(Tensor grad, Tensor y, Tensor softmax, Tensor input_mean, Tensor covariance, Tensor center,
    Tensor around, Tensor norm, Tensor weight1, Tensor norm_weight, Tensor norm_bias, Tensor weight2, Tensor beta,
    int kernel_size, bool tf32, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)

# Patches: the K values of `around` [N, H, W, R] in the footprint and the pixel's own `center` [N, H, W, C], C = R or 0. Columns
# of norm [3, columns] and weight [E, columns]: center's channels, then channel c at position o in column C + c * K + o
# -> the mean and biased variance of each column over all pixels, [columns] each
patch_statistics(Tensor center, Tensor around, int kernel_size) -> (Tensor mean, Tensor var)
# -> gradients of center, around
patch_statistics_backward(Tensor grad_mean, Tensor grad_var, Tensor center, Tensor around, Tensor mean, int kernel_size)
    -> (Tensor, Tensor)
# -> weight relu(norm(patch)), [N, E, H, W]
patch_linear(Tensor center, Tensor around, Tensor norm, Tensor weight, int kernel_size, bool tf32) -> Tensor
# -> gradients of center, around, norm, weight
patch_linear_backward(Tensor grad, Tensor center, Tensor around, Tensor norm, Tensor weight, int kernel_size, bool tf32)
    -> (Tensor, Tensor, Tensor, Tensor)
# The last Linear layer of a patchwise mapping and aggregation in one, without storing its result, the weights: hidden
# [N, H, W, E], weight [G * K, E], bias [G * K], beta [N, H, W, M] -> y [N, H, W, M]. On GPUs, E is at most 64, at most 8 value
# channels share a weight channel, and beta may be a half type where the others are float32
attend_patches(Tensor hidden, Tensor weight, Tensor bias, Tensor beta, int kernel_size, bool tf32) -> Tensor
# -> gradients of hidden, weight, bias, beta
attend_patches_backward(Tensor grad, Tensor hidden, Tensor weight, Tensor bias, Tensor beta, int kernel_size, bool tf32) ->
    (Tensor, Tensor, Tensor, Tensor)

# Dot products and aggregation in one, without storing the weights: phi, psi [N, H, W, R], beta [N, H, W, M]. The weights are
# the softmax over the footprint of dot and, at row a and column b of the footprint, scores_a + scores_{k + b}: scores
# [N, G, 2 * kernel_size, P]. All have one type, on GPUs float32; there, at most 64 channels share a weight channel
# -> y [N, H, W, M]; as in attend_pairs, softmax [N, 2, G, P]
attend_dot(Tensor phi, Tensor psi, Tensor scores, Tensor beta, int kernel_size) -> (Tensor, Tensor softmax)
# -> gradients of phi, psi, scores, beta; only GPUs read y, on CPUs any such map will do
attend_dot_backward(Tensor grad, Tensor y, Tensor softmax, Tensor phi, Tensor psi, Tensor scores, Tensor beta,
    int kernel_size) -> (Tensor, Tensor, Tensor, Tensor)

# BatchNorm and ReLU of a map x [N, H, W, C], float32 or, on GPUs, bfloat16; others are [C]. Without mean and var, x's are used
# -> relu((x - mean) / sqrt(var + eps) * weight + bias), and the mean and biased variance that were used, in float64
norm_relu(Tensor x, Tensor weight, Tensor bias, Tensor? mean, Tensor? var, float eps) -> (Tensor, Tensor mean, Tensor var)
# -> gradients of x, weight, bias; `of_batch`: mean and var are those of x. `added`, if given, is added to the gradient of x
norm_relu_backward(Tensor grad, Tensor x, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps, bool of_batch,
    Tensor? added=None) -> (Tensor, Tensor, Tensor)
# The same with `residual`, of x's shape and type: y = relu((x - mean) / sqrt(var + eps) * weight + bias + residual)
norm_add_relu(Tensor x, Tensor residual, Tensor weight, Tensor bias, Tensor? mean, Tensor? var, float eps) -> (Tensor,
    Tensor mean, Tensor var)
# -> gradients of x, residual, weight, bias
norm_add_relu_backward(Tensor grad, Tensor x, Tensor y, Tensor weight, Tensor bias, Tensor mean, Tensor var, float eps,
    bool of_batch) -> (Tensor, Tensor, Tensor, Tensor)

# 2x2 max pooling of a map x [N, H, W, C], float32 or, on GPUs, bfloat16. A last odd row or column is left out
# -> the maxima [N, H / 2, W / 2, C], and the pixels that they come from, 0 to 3 row by row, in uint8
max_pool(Tensor x) -> (Tensor, Tensor index)
max_pool_backward(Tensor grad, Tensor index, int height, int width) -> Tensor
# The same of relu(weight x + bias), for images x [N, H, W, c] that need no gradient, weight [C, c] and bias [C], all float32,
# with c up to 5; with `half`, on GPUs, the maxima are bfloat16. The index is 4 where they are 0
stem(Tensor weight, Tensor bias, Tensor x, bool half) -> (Tensor, Tensor index)
# -> gradients of weight, bias
stem_backward(Tensor grad, Tensor index, Tensor x) -> (Tensor, Tensor)

# Photographs for the network: image n [height, width, 3], uint8, is the part at `origin` of a picture of `extent` pixels, which
# is resized to `length` and cut to the square at `offset`; `windows` [N, 9] holds these pairs (along the height first) and
# whether the square is mirrored. out [N, 3, size, size] = pixel * scale + shift, of each channel
resample(Tensor[] images, Tensor windows, Tensor scale, Tensor shift, Tensor(a!) out) -> ()
"""


@functools.cache
def define(namespace: str) -> None:
    """Defines the operators as `torch.ops.<namespace>`, without kernels; once per process."""
    without_comments = re.sub(r"#.*", "", SCHEMAS).strip()
    for schema in re.split(r"\n+(?=\w)", without_comments):
        name, signature = " ".join(schema.split()).split("(", 1)
        torch.library.define(f"{namespace}::{name}", f"({signature}")
