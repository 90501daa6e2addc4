// Conversions by PTX instructions. Builds for the host (tests) replace this file.

__device__ __forceinline__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ __forceinline__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#if __CUDA_ARCH__ >= 800
#define CONVERTS_TO_BFLOAT16
__device__ __forceinline__ unsigned short float_to_bfloat16(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

// The root of a float from 2^-60 to 2^60, rounded as IEEE's: tried for all of them (tests/gpu/test_gpu_int8.py).
__device__ __forceinline__ float fast_root(float x) {
    float estimate;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(estimate) : "f"(x));
    const float root = x * estimate;
    return fmaf(fmaf(-root, root, x), 0.5f * estimate, root);
}

// The larger magnitude; NaN if one is NaN.
__device__ __forceinline__ float max_magnitude(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
#else
    return a != a || fabsf(a) > fabsf(b) ? fabsf(a) : fabsf(b);
#endif
}

// Bring a line into the L2 cache; an address that is not there does no harm.
__device__ __forceinline__ void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Whichever is the larger, as an unsigned number; of all lanes.
__device__ __forceinline__ unsigned warp_max(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(0xffffffffu, value);
#else
    for (int step = 16; step; step >>= 1) {
        const unsigned other = __shfl_xor_sync(0xffffffffu, value, step);
        value = other > value ? other : value;
    }
    return value;
#endif
}

// Whether a number is not 0 in any lane. All lanes go the same way then, and what is rare costs a jump.
__device__ __forceinline__ bool warp_any(unsigned number) { return __any_sync(0xffffffffu, number != 0); }

// 2^23 plus byte k of `word`: one instruction, where a conversion is four times as slow.
__device__ __forceinline__ float byte_beside(unsigned word, int k) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + k));
}

// The lowest bytes of four words.
__device__ __forceinline__ unsigned lowest_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}
