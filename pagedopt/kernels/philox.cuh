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
