// Parameters of 16 bits with nothing lost: rounded at random, so that the mean is the number, or with what is lost in a
// second column. formats/sixteen.py has the same for Numba and torch, to the same bits.

namespace sixteen {
constexpr unsigned SIGN = 0x80000000u, INFINITE = 0x7f800000u, LARGEST = 0x7f7fffffu;
constexpr unsigned NAN_HIGH = 0x7fc0u;
constexpr unsigned HALF_INFINITE = 0x477ff000u, HALF_LARGEST = 0x477fffffu, HALF_LEAST = 0x38800000u;

// The call that has the bits of four elements, number 4 * quad and on, and of the four that are 128 further on: as int8.
__device__ __forceinline__ Philox call_of(const Spot& spot, unsigned long long quad) {
    const unsigned long long call = quad / 64 * 32 + quad % 32;
    return Philox(call, call >> 32, spot.seed, spot.row, spot.seed >> 32, spot.input / 2);
}
__device__ __forceinline__ unsigned long long bits_of(const Philox& random, bool further) {
    const unsigned low = further ? random.word[2] : random.word[0], high = further ? random.word[3] : random.word[1];
    return (unsigned long long)high << 32 | low;
}

// 16 random bits for each of a thread's elements, those of four in a word.
template <int WIDTH> struct Bits {
    unsigned long long word[(WIDTH + QUAD - 1) / QUAD];
    bool swapped;
    __device__ __forceinline__ explicit Bits(const Spot& spot) : swapped(spot.input % 2 == 0) {
        const int shift = 16 * (spot.index % QUAD);  // where a row begins amid a quad, as a shard may
#pragma unroll
        for (int q = 0; q < WIDTH; q += 2 * QUAD) {
            const unsigned long long quad = (spot.index + Spot::offset(q)) / QUAD;
            const bool further = quad & 32;
            const Philox random = call_of(spot, quad);
            word[q / QUAD] = bits_of(random, further);
            if constexpr (WIDTH > QUAD)
                word[q / QUAD + 1] = further ? bits_of(call_of(spot, quad + 32), false) : bits_of(random, true);
        }
        if (shift)
#pragma unroll
            for (int q = 0; q < WIDTH; q += QUAD) {
                const unsigned long long next = (spot.index + Spot::offset(q)) / QUAD + 1;
                word[q / QUAD] = word[q / QUAD] >> shift | bits_of(call_of(spot, next), next & 32) << (64 - shift);
            }
    }
    __device__ __forceinline__ unsigned of(int i) const {
        const unsigned bits = (unsigned)(word[i / QUAD] >> 16 * (i % QUAD)) & 0xffffu;
        return swapped ? (bits & 255) << 8 | bits >> 8 : bits;
    }
};

__device__ __forceinline__ bool is_nan(unsigned bits) { return (bits & ~SIGN) > INFINITE; }

// The bits of a float, its magnitude lifted by `up` of their units. A finite number stays finite.
__device__ __forceinline__ unsigned lifted(unsigned bits, unsigned up) {
    const unsigned size = bits & ~SIGN;
    if (size >= INFINITE) return bits;
    return (bits & SIGN) | (size + up < LARGEST ? size + up : LARGEST);
}

// A float in 16 bits, given 16 random ones.
template <class T> __device__ __forceinline__ T drawn(float x, unsigned random);
template <> __device__ __forceinline__ bfloat16_bits drawn<bfloat16_bits>(float x, unsigned random) {
    const unsigned bits = __float_as_uint(x);
    return {(unsigned short)(is_nan(bits) ? 0x7fff : lifted(bits, random) >> 16)};
}
// Overflow is that of rounding to nearest.
template <> __device__ __forceinline__ half_bits drawn<half_bits>(float x, unsigned random) {
    const unsigned bits = __float_as_uint(x), size = bits & ~SIGN;
    if (size >= HALF_INFINITE) return store_as<half_bits, float>(x);
    unsigned half;
    if (size < HALF_LEAST) {  // denormals are multiples of 2^-24
        const float units = __uint_as_float(size) * 16777216.0f;
        half = (unsigned)units;
        half += ((float)random + 0.5f) * 1.52587890625e-05f < units - (float)half;
    } else {
        const unsigned up = size + (random >> 3);
        half = ((up < HALF_LARGEST ? up : HALF_LARGEST) - 0x38000000u) >> 13;
    }
    return {(unsigned short)(bits >> 16 & 0x8000u | half)};
}

// The float of both columns. What somebody has written over the upper one, a zero or an infinity, counts alone.
__device__ __forceinline__ float joined(unsigned high, int low) {
    const unsigned size = high & 0x7fffu;
    const bool alone = size == 0 ? low < 0 : size == 0x7f80u && low > 0;
    return __uint_as_float((high << 16) + (unsigned)(alone ? 0 : low));
}
// A column alone, rounded at random.
template <class T> struct Drawn {
    static constexpr int columns = 1;
    template <class S, int WIDTH> static __device__ __forceinline__ void load(S (&x)[WIDTH], const Spot& spot) {
        Plain<T>::template load<S, WIDTH>(x, spot);
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        const Bits<WIDTH> random(spot);
        unsigned bits[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) bits[i] = drawn<T>((float)x[i], random.of(i)).bits;
        Plain<unsigned short>::template store<unsigned, WIDTH>(bits, spot);
    }
};

template <int BITS> struct Low { typedef short type; };
template <> struct Low<8> { typedef signed char type; };

// A bfloat16, and the 16 bits that it has lost, or of them the upper 8, rounded at random.
template <int BITS> struct Split {
    static constexpr int columns = 2;
    typedef typename Low<BITS>::type Type;
    template <class S, int WIDTH> static __device__ __forceinline__ void load(S (&x)[WIDTH], const Spot& spot) {
        unsigned high[WIDTH] = {};
        int low[WIDTH] = {};
        Plain<unsigned short>::template load<unsigned, WIDTH>(high, spot);
        Plain<Type>::template load<int, WIDTH>(low, spot.behind());
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] = (S)joined(high[i], low[i] * (1 << (16 - BITS)));
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        unsigned high[WIDTH];
        int low[WIDTH];
        const auto split = [&](int i, unsigned bits) {
            const bool nan = x[i] != x[i];  // whose bits may be rounded to those of a zero
            high[i] = nan ? NAN_HIGH : (bits + 0x8000u) >> 16;
            low[i] = nan ? 0 : (int)(bits - (high[i] << 16)) >> (16 - BITS);
        };
        if constexpr (BITS == 8) {
            const Bits<WIDTH> random(spot);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) split(i, lifted(__float_as_uint((float)x[i]), random.of(i) >> 8));
        } else
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) split(i, __float_as_uint((float)x[i]));
        Plain<unsigned short>::template store<unsigned, WIDTH>(high, spot);
        Plain<Type>::template store<int, WIDTH>(low, spot.behind());
    }
};
}  // namespace sixteen

// Packs of four elements of 16 bits are moved at once.
template <class T> struct Aligned<sixteen::Drawn<T>> { static constexpr int bytes = 8; };
template <int BITS> struct Aligned<sixteen::Split<BITS>> { static constexpr int bytes = 8; };
