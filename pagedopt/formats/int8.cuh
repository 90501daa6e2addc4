// State in 8 bits: a code for each element, and the largest magnitude of each block of 256 in float32. notes/int8.md
// says why these codes; formats/int8.py has the same for Numba and torch, to the same bits.

// Philox 4x32 with 10 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
struct Philox {
    unsigned word[4];
    __device__ __forceinline__ Philox(unsigned a, unsigned b, unsigned c, unsigned d, unsigned key, unsigned other) {
#pragma unroll
        for (int round = 0; round < 10; ++round) {
            const unsigned long long left = 0xd2511f53ull * a, right = 0xcd9e8d57ull * c;
            a = (unsigned)(right >> 32) ^ b ^ key;
            c = (unsigned)(left >> 32) ^ d ^ other;
            b = (unsigned)right;
            d = (unsigned)left;
            key += 0x9e3779b9u;
            other += 0xbb67ae85u;
        }
        word[0] = a, word[1] = b, word[2] = c, word[3] = d;
    }
};

namespace int8 {
constexpr int BLOCK_NUMEL = 256, EACH = 8;  // elements of a block, which a warp has, and how many of them a thread has
constexpr float LEAST = 5.0487098e-29f;     // 2^-94, the least magnitude of a block that is not all zero
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

// The lowest byte of each code, where the mask has ones.
template <class Code> __device__ __forceinline__ void store_codes(const unsigned* code, unsigned mask, const Spot& spot) {
#pragma unroll
    for (int q = 0; q < EACH; q += QUAD) {
        Code* to = spot.column<Code>(0) + (spot.at + Spot::offset(q));
        const unsigned word = lowest_bytes(code[q], code[q + 1], code[q + 2], code[q + 3]) & mask;
        if (spot.aligned && q + QUAD <= spot.live) *(unsigned*)to = word;
        else
#pragma unroll
            for (int i = 0; i < QUAD; ++i)
                if (q + i < spot.live) to[i] = (Code)(word >> 8 * i);
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
    return most && absmax < LEAST ? LEAST : absmax;
}
}  // namespace int8

// No element needs to be clamped to the largest code: the share of an element in the largest magnitude is 1 at most, or 1
// and a rounding, whose root rounds to the same code.

// First moments: the code's square, with its sign. -128 is NaN.
struct Root2 {
    static constexpr int columns = 2;
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
            x[i] = (S)(((code * fabsf(code)) * (1.0f / 16129.0f)) * absmax);
        }
        if (warp_any(any_nan))
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (int8::is_zero_byte(word, i)) x[i] = (S)__uint_as_float(0x7fffffffu);
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        bool all_finite;
        const float absmax = int8::absmax_of(x, all_finite);
        const float scale = absmax > 0.0f ? 16129.0f / absmax : 0.0f;
        int8::store_absmax(absmax, spot);
        unsigned code[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float value = (float)x[i];
            const float square = fmaxf(fabsf(value) * scale, 1e-6f);
            code[i] = __float_as_uint(copysignf(fast_root(square), value) + int8::ROUND);
        }
        if (warp_any(!all_finite))
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (!int8::is_finite((float)x[i])) code[i] = 0x80;
        int8::store_codes<signed char>(code, ~0u, spot);
    }
};

// Second moments: the code's fourth power. 0 is infinity, and the code of every element while a block is all zero.
template <bool STOCHASTIC> struct Root4 {
    static constexpr int columns = 2;
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
        bool all_finite;
        const float absmax = int8::absmax_of(x, all_finite);
        const float scale = absmax > 0.0f ? 4228250624.0f / absmax : 0.0f;
        int8::store_absmax(absmax, spot);
        const Philox random = draw(spot);
        unsigned code[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const float value = (float)x[i];
            const float square = fast_root(fmaxf(value * scale, 1.0f));
            const float part = half_beside(random.word[i / 2], i % 2) - 8388608.0f;
            const float rounded = round(square, fast_root(square), part, value == absmax);
            code[i] = __float_as_uint(rounded + int8::ROUND);
        }
        if (warp_any(!all_finite))
#pragma unroll
            for (int i = 0; i < WIDTH; ++i)
                if (!int8::is_finite((float)x[i])) code[i] = 0;
        int8::store_codes<unsigned char>(code, absmax > 0.0f ? ~0u : 0u, spot);
    }

private:
    // 16 random bits for each of a thread's elements: of the parameter, its element, the step and the state.
    static __device__ __forceinline__ Philox draw(const Spot& spot) {
        const unsigned long long index = spot.index, seed = STOCHASTIC ? spot.seed : 0;
        const unsigned long long place = index / int8::BLOCK_NUMEL * 32 + index % int8::BLOCK_NUMEL / QUAD;
        return Philox(place, place >> 32, seed, spot.row, seed >> 32, spot.input);
    }
    // The code of an element whose square root and fourth root these are, in units of the code.
    static __device__ __forceinline__ float round(float square, float root, float random, bool is_largest) {
        if constexpr (!STOCHASTIC) return root;  // adding ROUND rounds to the nearest
        const float low = fminf(((root - 0.5f) + int8::ROUND) - int8::ROUND, 254.0f), low2 = low * low;
        const float d = low + low + 1.0f, step = d * ((low2 + low2) + d), rest = (square - low2) * (square + low2);
        const bool up = (random * 1.52587890625e-05f) * step < rest;
        return is_largest ? 255.0f : up ? low + 1.0f : low;
    }
};
