// foreach_norm in two launches over one table of lists (tensor, partials, result): first each chunk writes one partial
// norm, then each tensor's partials are joined in a fixed order. No atomics: the same input gives the same bits.

constexpr int BLOCK = 512;

template <class S, int ORDER> __device__ __forceinline__ S join(S a, S b) {
    return ORDER == 0 ? element_max<S>(a, b) : a + b;  // order 0: infinity
}

// Join one value from each of THREADS threads (a warp or the block); only the first thread has the result.
template <class S, int ORDER, int THREADS> __device__ S group_join(S value) {
    for (int step = 16; step; step >>= 1) value = join<S, ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    if constexpr (THREADS > 32) {
        __shared__ S part[32];
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
        __syncthreads();
        value = threadIdx.x < THREADS / 32 ? part[threadIdx.x] : S(0);
        if (threadIdx.x < 32)
            for (int step = 16; step; step >>= 1)
                value = join<S, ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    }
    return value;
}

template <class S, int ORDER, int THREADS, class Table, class T>
__global__ void __launch_bounds__(BLOCK) norm_chunks(const __grid_constant__ Table table) {
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // all threads of a chunk return together
    const int lane = threadIdx.x % THREADS;
    const word* words = table.data();
    const Chunk chunk = chunk_of(table, item);
    const Row<3>& row = ((const Row<3>*)(words + table.header.rows))[chunk.row];
    const long long left = row.numel - chunk.offset;
    const int numel = (int)(left < table.header.chunk_numel ? left : table.header.chunk_numel);
    const T* data = (const T*)row.address[0] + chunk.offset;
    S sum = 0;
    for (int i = lane; i < numel; i += THREADS) {
        const S x = load_as<S, T>(data[i]);
        sum = join<S, ORDER>(sum, ORDER == 2 ? x * x : element_abs<S>(x));
    }
    sum = group_join<S, ORDER, THREADS>(sum);
    if (lane == 0) ((S*)row.address[1])[chunk.offset / table.header.chunk_numel] = sum;
}

// The threads of a row's first chunk join the partials of the row.
template <class S, int ORDER, int THREADS, class Table, class R>
__global__ void __launch_bounds__(BLOCK) norm_rows(const __grid_constant__ Table table) {
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;
    const int lane = threadIdx.x % THREADS;
    const word* words = table.data();
    const Chunk chunk = chunk_of(table, item);
    if (chunk.offset != 0) return;
    const Row<3>& row = ((const Row<3>*)(words + table.header.rows))[chunk.row];
    const long long partials = (row.numel + table.header.chunk_numel - 1) / table.header.chunk_numel;
    S sum = 0;
    for (long long i = lane; i < partials; i += THREADS) sum = join<S, ORDER>(sum, ((const S*)row.address[1])[i]);
    sum = group_join<S, ORDER, THREADS>(sum);
    if (lane == 0) *(R*)row.address[2] = store_as<R, S>(ORDER == 2 ? element_sqrt<S>(sum) : sum);
}
