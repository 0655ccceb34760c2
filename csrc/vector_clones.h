// MEGALITE_VECTOR before a function: built for several vector widths, the widest that the machine has is chosen at run time.
// MEGALITE_VECTOR_BYTES: the width that fits the code of the widest of them; 128 bits every machine with vectors has.
// 512-bit vectors are left out: for the short loops here they were 15 % slower (blend of 1,000 datasets, AMD EPYC).
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define MEGALITE_VECTOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#define MEGALITE_VECTOR_BYTES 32
#else
#define MEGALITE_VECTOR
#define MEGALITE_VECTOR_BYTES 16
#endif
