// foreach_norm in two launches over one table of (tensor, partials, result) lists: every chunk leaves one partial, then
// every tensor's partials are added in a fixed order. No atomics, so the same input gives the same bits.

template <class S, int ORDER> __device__ __forceinline__ S join(S a, S b) {
    return ORDER == 0 ? element_max<S>(a, b) : a + b;  // order 0 stands for infinity
}

template <class S, int ORDER> __device__ S block_join(S value) {
    __shared__ S part[32];
    for (int step = 16; step; step >>= 1) value = join<S, ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < BLOCK / 32 ? part[threadIdx.x] : S(0);
    if (threadIdx.x < 32)
        for (int step = 16; step; step >>= 1) value = join<S, ORDER>(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;  // right in thread 0
}

template <class S, int ORDER, class Table, class T>
__global__ void __launch_bounds__(BLOCK) norm_chunks(const __grid_constant__ Table table) {
    const word* words = table.data();
    const Chunk chunk = ((const Chunk*)(words + table.header.chunks))[blockIdx.x];
    const Row<3>& row = ((const Row<3>*)(words + table.header.rows))[chunk.row];
    const long long left = row.numel - chunk.offset;
    const int numel = (int)(left < table.header.chunk_numel ? left : table.header.chunk_numel);
    const T* data = (const T*)row.address[0] + chunk.offset;
    S sum = 0;
    for (int i = threadIdx.x; i < numel; i += BLOCK) {
        const S x = load_as<S, T>(data[i]);
        sum = join<S, ORDER>(sum, ORDER == 2 ? x * x : element_abs<S>(x));
    }
    sum = block_join<S, ORDER>(sum);
    if (threadIdx.x == 0) ((S*)row.address[1])[chunk.offset / table.header.chunk_numel] = sum;
}

// One block per row; `count` is the number of rows.
template <class S, int ORDER, class Table, class R>
__global__ void __launch_bounds__(BLOCK) norm_rows(const __grid_constant__ Table table) {
    const Row<3>& row = ((const Row<3>*)(table.data() + table.header.rows))[blockIdx.x];
    const long long partials = (row.numel + table.header.chunk_numel - 1) / table.header.chunk_numel;
    S sum = 0;
    for (long long i = threadIdx.x; i < partials; i += BLOCK) sum = join<S, ORDER>(sum, ((const S*)row.address[1])[i]);
    sum = block_join<S, ORDER>(sum);
    if (threadIdx.x == 0) *(R*)row.address[2] = store_as<R, S>(ORDER == 2 ? element_sqrt<S>(sum) : sum);
}
