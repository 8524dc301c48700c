// Marks of functions whose loops the compiler vectorizes.
#pragma once

// The compiler emits each marked function for these instruction sets and picks one when the library is loaded.
#if defined(__x86_64__)
#if __GNUC__ < 12  // does not know the levels here
#define SAN_VECTOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SAN_VECTOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#else
#define SAN_VECTOR
#endif

// Pointers that do not overlap, so the compiler can vectorize without a check.
#define SAN_RESTRICT __restrict__
