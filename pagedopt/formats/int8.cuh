// State in 8 bits: a code for each element, and the largest magnitude of each block of 256 in float32. notes/int8.md
// says why these codes; formats/int8.py has the same for Numba and torch, to the same bits.

namespace int8 {
#ifdef __CUDACC_RTC__  // Builds for the host (tests) have functions of their own for these.
// Roots to a few parts in a million, of 0 or a normal number: what is made of them is corrected. From 1 on the second.
__device__ __forceinline__ float about_cube_root(float x) {
    float power, root;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(power * (1.0f / 3.0f)));
    return root;
}
__device__ __forceinline__ float about_fourth_root(float x) {
    float one_over, root;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(one_over) : "f"(x));
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(root) : "f"(one_over));
    return root;
}

// 2^23 plus half k of `word`, whose bytes are swapped if `swapped`.
__device__ __forceinline__ float half_of(unsigned word, int k, bool swapped) {
    const unsigned first = swapped ? 0x7401 : 0x7410, second = swapped ? 0x7423 : 0x7432;
    return __uint_as_float(__byte_perm(word, 0x4b000000u, k ? second : first));
}

// The bits that are set in an odd number of lanes.
__device__ __forceinline__ unsigned warp_xor(unsigned value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_xor_sync(0xffffffffu, value);
#else
    for (int step = 16; step; step >>= 1) value ^= __shfl_xor_sync(0xffffffffu, value, step);
    return value;
#endif
}

// The same number, of which the compiler knows nothing: what is made of it is made anew, and not kept in registers.
__device__ __forceinline__ unsigned opaque(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
#endif

constexpr int BLOCK_NUMEL = 256, EACH = 8;  // elements of a block, which a warp has, and how many of them a thread has
constexpr float MIN_ABS = 5.0487098e-29f;   // 2^-94, the least magnitude of a block that is not all zero
constexpr float ROUND = 12582912.0f;        // 1.5 * 2^23: adding it leaves a rounded integer in the lowest bits
constexpr unsigned INFINITE = 0x7f800000u;

__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }
__device__ __forceinline__ bool is_finite(float x) { return magnitude(x) < INFINITE; }

// Not 0 if a byte is 0.
__device__ __forceinline__ unsigned zero_bytes(unsigned word) { return (word - 0x01010101u) & ~word & 0x80808080u; }
__device__ __forceinline__ bool is_zero_byte(const unsigned* word, int i) {
    return (word[i / QUAD] >> 8 * (i % QUAD) & 255) == 0;
}

// A thread's codes, four in a word.
template <class Code> __device__ __forceinline__ void load_codes(unsigned* word, const Spot& spot) {
#pragma unroll
    for (int q = 0; q < EACH; q += QUAD) {
        const Code* from = spot.column<const Code>(0) + (spot.at + Spot::offset(q));
        word[q / QUAD] = 0;
        if (spot.aligned && q + QUAD <= spot.live) {
            prefetch(from + spot.next);
            word[q / QUAD] = *(const unsigned*)from;
        } else
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (q + i < spot.live) word[q / QUAD] |= (unsigned)(unsigned char)from[i] << 8 * i;
    }
}

// Store a thread's codes, four in a word.
template <class Code> __device__ __forceinline__ void store_codes(const unsigned* word, const Spot& spot) {
#pragma unroll
    for (int q = 0; q < EACH; q += QUAD) {
        Code* to = spot.column<Code>(0) + (spot.at + Spot::offset(q));
        if (spot.aligned && q + QUAD <= spot.live) *(unsigned*)to = word[q / QUAD];
        else
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (q + i < spot.live) to[i] = (Code)(word[q / QUAD] >> 8 * i);
    }
}

__device__ __forceinline__ float load_absmax(const Spot& spot) {
    const float* from = spot.column<const float>(1) + spot.at / BLOCK_NUMEL;
    if (spot.aligned) prefetch(from + spot.next / BLOCK_NUMEL);
    return spot.live ? *from : 0.0f;
}
__device__ __forceinline__ void store_absmax(float absmax, const Spot& spot) {
    if (spot.live && spot.at % BLOCK_NUMEL == 0) spot.column<float>(1)[spot.at / BLOCK_NUMEL] = absmax;
}

// The largest magnitude in a block, of its finite elements; `all_finite` says whether these are all.
template <class S> __device__ __forceinline__ float absmax_of(const S* x, bool& all_finite) {
    float largest = 0.0f;  // NaN if an element is NaN
#pragma unroll
    for (int i = 0; i < EACH; ++i) largest = max_magnitude(largest, (float)x[i]);
    unsigned most = warp_max(__float_as_uint(largest));  // of floats that are not negative, the order is that of bits
    all_finite = most < INFINITE;
    if (!all_finite) {  // all lanes of the warp, or none
        most = 1;
        for (int i = 0; i < EACH; ++i) {
            const unsigned each = magnitude((float)x[i]);
            if (each < INFINITE && each > most) most = each;
        }
        most = warp_max(most);
    }
    const float absmax = __uint_as_float(most);
    return most && absmax < MIN_ABS ? MIN_ABS : absmax;
}

// To the nearest code; or at random, by bits of the step, or of the block's elements where no steps are counted.
enum Rounding { NEAREST, BY_STEP, BY_DATA };

// What a share of the largest magnitude is multiplied by. At random, the largest gets `whole` or more, and so its code.
template <Rounding HOW> __device__ __forceinline__ float scale_of(float whole, float absmax) {
    if (!(absmax > 0.0f)) return 0.0f;
    const float scale = whole / absmax;
    return HOW != NEAREST && scale * absmax < whole ? __uint_as_float(__float_as_uint(scale) + 1) : scale;
}

// The nearest integer, of a float that is not negative.
__device__ __forceinline__ float rounded(float x) { return (x + ROUND) - ROUND; }

// The third word of a block's counters.
template <Rounding HOW, class S> __device__ __forceinline__ unsigned when_of(const S* x, const Spot& spot) {
    unsigned mixed = (unsigned)spot.seed;
    if constexpr (HOW == BY_DATA) {
        mixed = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mixed ^= is_finite((float)x[i]) ? __float_as_uint((float)x[i]) : 0u;
        mixed = warp_xor(mixed);
    }
    return mixed;
}

// 16 random bits for each of a thread's elements: the upper ones, which nearly always decide, or the `lower` ones. Two
// neighbours among the inputs share a call, of which the compiler then makes one.
__device__ __forceinline__ Philox draw(const Spot& spot, unsigned when, bool lower) {
    const unsigned long long index = spot.index, seed = spot.seed;
    const unsigned long long position = index / BLOCK_NUMEL * 32 + index % BLOCK_NUMEL / QUAD;
    const unsigned high = (unsigned)(position >> 32) | (lower ? 0x80000000u : 0u);
    return Philox(position, high, when, spot.row, seed >> 32, spot.input / 2);
}
// Those of element i; the first of two neighbours has the bytes swapped.
__device__ __forceinline__ float bits_for(int i, const Philox& random, const Spot& spot) {
    return half_of(random.word[i / 2], i % 2, spot.input % 2 == 0) - 8388608.0f;
}

// The codes of a thread's elements, four in a word: the lowest byte of each.
template <class Code> __device__ __forceinline__ void pack(unsigned* word, Code code) {
#pragma unroll
    for (int q = 0; q < EACH; q += QUAD) {
        unsigned each[QUAD];
#pragma unroll
        for (int i = 0; i < QUAD; ++i) each[i] = code(q + i);
        word[q / QUAD] = lowest_bytes(each[0], each[1], each[2], each[3]);
    }
}

constexpr float UNIT = 1.52587890625e-05f;  // 2^-16

// Where a share of the largest magnitude lies: `rest` above the number of the code `low`, of `step` to the next one's.
struct Between {
    float low, rest, unit;  // unit: step / 2^16
};

// Store x in the codes of Root. At random, the code `low` is lifted to the next one if u < rest / step, where u has 32
// random bits. Its upper half decides nearly always: only where it does not, all codes are computed again with all bits.
template <class Root, Rounding HOW, class S>
__device__ __forceinline__ void store(const S* x, const Spot& spot) {
    bool all_finite;
    const float absmax = absmax_of(x, all_finite), scale = scale_of<HOW>(Root::whole, absmax);
    store_absmax(absmax, spot);
    unsigned word[EACH / QUAD], when = 0;
    bool again = !all_finite;
    if constexpr (HOW == NEAREST) {
        pack(word, [&](int i) { return Root::code(Root::nearest(Root::share((float)x[i], scale)), (float)x[i]); });
    } else {
        when = when_of<HOW>(x, spot);
        const Philox upper = draw(spot, when, false);
        pack(word, [&](int i) {
            const Between at = Root::between(Root::share((float)x[i], scale));
            const float left = fmaf(-bits_for(i, upper, spot), at.unit, at.rest);
            again = again || __float_as_uint(left) < __float_as_uint(at.unit);  // from 0 to below unit: u is close
            return Root::code(left >= at.unit ? at.low + 1.0f : at.low, (float)x[i]);
        });
    }
    if (warp_any(again)) {  // a loop: eight elements at once would want registers that all of the kernel then lacks
        float value[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) value[i] = (float)x[i];
        Philox upper(0, 0, 0, 0, 0, 0), lower = upper;
        if constexpr (HOW != NEAREST) upper = draw(spot, opaque(when), false), lower = draw(spot, opaque(when), true);
        unsigned long long codes = 0;
#pragma unroll 1
        for (int i = 0; i < EACH; ++i) {
            unsigned code;
            if constexpr (HOW == NEAREST) code = Root::code(Root::nearest(Root::share(value[i], scale)), value[i]);
            else {
                const Between at = Root::between(Root::share(value[i], scale));
                const float left = fmaf(-bits_for(i, upper, spot), at.unit, at.rest);
                const float u = (bits_for(i, lower, spot) + 0.5f) * UNIT;
                code = Root::code(u * at.unit < left ? at.low + 1.0f : at.low, value[i]);
            }
            if (!is_finite(value[i])) code = Root::not_finite;
            codes |= (unsigned long long)(code & 255) << 8 * i;
        }
        word[0] = (unsigned)codes, word[1] = (unsigned)(codes >> 32);
    }
    if (!(absmax > 0.0f)) word[0] = word[1] = 0;
    store_codes<typename Root::Code>(word, spot);
}
}  // namespace int8

// First moments: the code's cube. -128 is NaN.
template <int8::Rounding HOW> struct Root3 {
    static constexpr int columns = 2;
    static constexpr float whole = 2048383.0f;  // the cube of the largest code
    static constexpr unsigned not_finite = 0x80;
    typedef signed char Code;
    template <class S, int WIDTH> static __device__ __forceinline__ void load(S (&x)[WIDTH], const Spot& spot) {
        static_assert(WIDTH == int8::EACH, "a warp takes one block");
        unsigned word[WIDTH / QUAD], any_nan = 0;
        int8::load_codes<signed char>(word, spot);
        const float absmax = int8::load_absmax(spot);
#pragma unroll
        for (int q = 0; q < WIDTH; q += QUAD) {
            word[q / QUAD] ^= 0x80808080u;  // 128 more: none is negative
            any_nan |= int8::zero_bytes(word[q / QUAD]);
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float code = byte_beside(word[i / QUAD], i % QUAD) - 8388736.0f;
            x[i] = (S)(((code * code) * (code * (1.0f / 2048383.0f))) * absmax);
        }
        if (warp_any(any_nan))
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (int8::is_zero_byte(word, i)) x[i] = (S)__uint_as_float(0x7fffffffu);
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        int8::store<Root3, HOW>(x, spot);
    }
    static __device__ __forceinline__ float share(float value, float scale) { return fabsf(value) * scale; }
    // The estimate of a root may be off by 0.4: what lies below is compared.
    static __device__ __forceinline__ int8::Between between(float share) {
        constexpr float THREE = 3.0f * int8::UNIT;
        const float near = int8::rounded(int8::about_cube_root(share)), cube = (near * near) * near;
        const float low = fminf(cube > share ? near - 1.0f : near, 126.0f);
        return {low, fmaf(-(low * low), low, share), fmaf(fmaf(THREE, low, THREE), low, int8::UNIT)};
    }
    // The largest code whose lower limit, (2c - 1)^3 / 8, is not above the share.
    static __device__ __forceinline__ float nearest(float share) {
        const float near = int8::rounded(int8::about_cube_root(share) + 0.5f), odd = near + near - 1.0f;
        return (odd * odd) * odd > 8.0f * share ? near - 1.0f : near;
    }
    static __device__ __forceinline__ unsigned code(float size, float value) {
        return __float_as_uint(copysignf(size, value) + int8::ROUND);
    }
};

// Second moments: the code's fourth power. 0 is infinity, and the code of every element while a block is all zero.
template <int8::Rounding HOW> struct Root4 {
    static constexpr int columns = 2;
    static constexpr float whole = 4228250624.0f;  // the fourth power of the largest code, in float32
    static constexpr unsigned not_finite = 0;
    typedef unsigned char Code;
    template <class S, int WIDTH> static __device__ __forceinline__ void load(S (&x)[WIDTH], const Spot& spot) {
        static_assert(WIDTH == int8::EACH, "a warp takes one block");
        unsigned word[WIDTH / QUAD], any_zero = 0;
        int8::load_codes<unsigned char>(word, spot);
        const float absmax = int8::load_absmax(spot);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float code = byte_beside(word[i / QUAD], i % QUAD) - 8388608.0f;
            const float root = (code * code) * (1.0f / 65025.0f);
            x[i] = (S)((root * root) * absmax);
        }
#pragma unroll
        for (int q = 0; q < WIDTH; q += QUAD) any_zero |= int8::zero_bytes(word[q / QUAD]);
        if (warp_any(absmax > 0.0f ? any_zero : 0u))
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (i < spot.live && int8::is_zero_byte(word, i)) x[i] = (S)__uint_as_float(int8::INFINITE);
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        int8::store<Root4, HOW>(x, spot);
    }
    static __device__ __forceinline__ float share(float value, float scale) { return fmaxf(value * scale, 1.0f); }
    static __device__ __forceinline__ int8::Between between(float share) {
        constexpr float FOUR = 4.0f * int8::UNIT, SIX = 6.0f * int8::UNIT;
        const float near = int8::rounded(int8::about_fourth_root(share)), near2 = near * near;
        const float low = fminf(fmaf(-near2, near2, share) < 0.0f ? near - 1.0f : near, 254.0f), low2 = low * low;
        return {low, fmaf(-low2, low2, share), fmaf(fmaf(fmaf(FOUR, low, SIX), low, FOUR), low, int8::UNIT)};
    }
    static __device__ __forceinline__ float nearest(float share) { return fast_root(fast_root(share)); }
    // Adding ROUND rounds what is nearest; a number above whole, by a rounding, has the largest code still.
    static __device__ __forceinline__ unsigned code(float size, float) { return __float_as_uint(size + int8::ROUND); }
};
