// What norms are made of: the sum of each chunk's terms, and the sum of many sums. All sums are doubles, and each is made
// in one order, which kernels/cpu.py has for a CPU, too: term i of a chunk goes into sum i % (THREADS * WIDTH), term
// after term; then neighbours are added, until one is left. Terms are those of a norm's ORDER: squares (2), magnitudes (1),
// or magnitudes of which the largest is the "sum" (0, for infinity).

constexpr int BLOCK = 512;

template <int ORDER> __device__ __forceinline__ double add(double a, double b) {
    return ORDER == 0 ? element_max<double>(a, b) : a + b;
}

// Add neighbours among THREADS sums (of a warp or the block); only the first thread has the result.
template <int ORDER, int THREADS> __device__ __forceinline__ double add_neighbours(double value) {
    for (int step = 1; step < 32; step <<= 1) value = add<ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    if constexpr (THREADS > 32) {
        constexpr int WARPS = THREADS / 32;
        __shared__ double part[WARPS];
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
        __syncthreads();
        value = threadIdx.x < WARPS ? part[threadIdx.x] : 0.0;
        if (threadIdx.x < 32)
            for (int step = 1; step < WARPS; step <<= 1)
                value = add<ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

template <class T, int WIDTH> struct alignas(16) Pack {
    T value[WIDTH];
};

// A row has the address of a tensor, and that of the first of its chunks' sums.
template <int ORDER, int THREADS, class Table, class T>
__global__ void __launch_bounds__(BLOCK) sums(const __grid_constant__ Table table) {
    constexpr int WIDTH = 16 / sizeof(T);
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // all threads of a chunk return together
    const int lane = threadIdx.x % THREADS;
    const Chunk chunk = chunk_of(table, item);
    const Row<2>& row = ((const Row<2>*)(table.data() + table.header.rows))[chunk.row];
    const long long left = row.numel - chunk.offset;
    const int numel = (int)(left < table.header.chunk_numel ? left : table.header.chunk_numel);
    const T* from = (const T*)row.address[0] + chunk.offset;
    double sum[WIDTH] = {};
    const auto take = [&](int j, T value) {
        const double x = load_as<double, T>(value);
        sum[j] = add<ORDER>(sum[j], ORDER == 2 ? x * x : element_abs<double>(x));
    };
    int i = lane * WIDTH;
    if ((word)from % sizeof(Pack<T, WIDTH>) == 0) {
#pragma unroll 4
        for (; i + WIDTH <= numel; i += THREADS * WIDTH) {
            const Pack<T, WIDTH> pack = *(const Pack<T, WIDTH>*)(from + i);
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) take(j, pack.value[j]);
        }
    }
    for (; i < numel; i += THREADS * WIDTH)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j)
            if (i + j < numel) take(j, from[i + j]);
#pragma unroll
    for (int n = WIDTH / 2; n; n /= 2)
#pragma unroll
        for (int j = 0; j < n; ++j) sum[j] = add<ORDER>(sum[2 * j], sum[2 * j + 1]);
    const double all = add_neighbours<ORDER, THREADS>(sum[0]);
    if (lane == 0) ((double*)row.address[1])[chunk.offset / table.header.chunk_numel] = all;
}

struct TotalAt {
    const double* sums;
    long long count;
    double* total;   // where their sum goes; null: nowhere
    Factor* factor;  // what it is the square of the norm for; null: for nothing, yet
};

// One block adds sums. What is infinite or NaN makes of the coefficient what it makes of torch's clip_grad_norm_.
template <int THREADS> __global__ void __launch_bounds__(BLOCK) total(const __grid_constant__ TotalAt at) {
    double sum = 0;
    for (long long i = threadIdx.x; i < at.count; i += THREADS) sum += at.sums[i];
    sum = add_neighbours<2, THREADS>(sum);
    if (threadIdx.x != 0) return;
    if (at.total) *at.total = sum;
    if (!at.factor) return;
    const double norm = sqrt(sum) / (double)at.factor->scale;
    const double coefficient = at.factor->max_norm / (norm + 1e-6);
    at.factor->norm = norm;
    at.factor->coefficient = coefficient > 1.0 ? 1.0 : coefficient;  // NaN stays
    if (at.factor->skips == 0) return;
    const bool nonfinite = !(norm - norm == 0);
    at.factor->nonfinite = nonfinite;
    at.factor->skipped += nonfinite;
}
