// Multi-tensor apply over lists in any format. A format may exchange values between the threads of one of its blocks, or
// use the position of an element. Therefore a row of the table has two more words, the number of its parameter and its
// first element there, and a set of hyperparameters has a seed.
//
// A thread takes WIDTH elements, in quads of four that follow each other. A warp takes 32 * WIDTH that follow each other:
// first the quads of all its lanes, one after the other, then their next quads. So all its accesses are whole lines.

constexpr int QUAD = 4;

// The elements of one thread, as a format loads or stores them. Element i is there if i < live, and stands at
// at + offset(i) in the row, and at index + offset(i) in the parameter.
struct Spot {
    const word* columns;  // addresses of the format's columns
    int skipped;          // words between the first and the second of them: those of all other lists, for a parameter
    long long at;         // index of the first element in the row
    int live;             // number of elements; fewer than WIDTH at the end of the row
    int next;             // how much further the thread's next elements are
    bool aligned;         // every column begins at a multiple of 4 bytes
    int input;            // index of the list among the rule's inputs
    long long row;        // number of the parameter in its optimizer
    long long index;      // index of the first element in the parameter
    unsigned long long seed;  // the optimizer's seed in the upper half, the step in the lower one
    template <class T> __device__ T* column(int i) const { return (T*)columns[i ? i + skipped : 0]; }
    // The same place in the columns from the second on.
    __device__ Spot behind() const {
        Spot spot = *this;
        spot.columns += 1 + skipped;
        spot.skipped = 0;
        return spot;
    }
    static __device__ constexpr int offset(int i) { return i / QUAD * (32 * QUAD) + i % QUAD; }
};

// Reduce one value per thread over the threads that share a block of BLOCK_NUMEL elements, WIDTH elements each. All of a
// thread's elements must be of one block: WIDTH is QUAD or less, or the block is all that a warp takes.
template <int BLOCK_NUMEL, int WIDTH, class S> __device__ S block_max(S value) {
    static_assert(WIDTH <= QUAD || BLOCK_NUMEL == 32 * WIDTH, "a thread has elements of several blocks");
    for (int step = BLOCK_NUMEL / WIDTH / 2; step; step >>= 1)
        value = element_max<S>(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}
template <int BLOCK_NUMEL, int WIDTH, class S> __device__ S block_sum(S value) {
    static_assert(WIDTH <= QUAD || BLOCK_NUMEL == 32 * WIDTH, "a thread has elements of several blocks");
    for (int step = BLOCK_NUMEL / WIDTH / 2; step; step >>= 1) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

// Store a pack in one access. The compiler would make four of an assignment between other stores.
template <class Whole> __device__ __forceinline__ void store_pack(void* to, const Whole& pack) {
#ifdef __CUDACC_RTC__
    if constexpr (sizeof(Whole) == 16) {
        const unsigned* part = (const unsigned*)&pack;
        asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(part[0]), "r"(part[1]), "r"(part[2]),
                     "r"(part[3]) : "memory");
        return;
    }
#endif
    *(Whole*)to = pack;
}

// A list of plain numbers in a launch with a format that is not plain.
template <class T> struct Plain {
    static constexpr int columns = 1;
    template <class S, int WIDTH> static __device__ __forceinline__ void load(S (&x)[WIDTH], const Spot& spot) {
        constexpr int SIZE = WIDTH < QUAD ? WIDTH : QUAD;
        typedef Pack<T, SIZE> Whole;
#pragma unroll
        for (int q = 0; q < WIDTH; q += SIZE) {
            const T* from = spot.column<const T>(0) + (spot.at + Spot::offset(q));
            if (spot.aligned) prefetch(from + spot.next);
            if (q + SIZE <= spot.live && (spot.aligned || (word)from % alignof(Whole) == 0)) {
                const Whole pack = *(const Whole*)from;
#pragma unroll
                for (int i = 0; i < SIZE; ++i) x[q + i] = load_as<S, T>(pack.value[i]);
            } else
#pragma unroll
                for (int i = 0; i < SIZE; ++i)
                    if (q + i < spot.live) x[q + i] = load_as<S, T>(from[i]);
        }
    }
    template <class S, int WIDTH> static __device__ __forceinline__ void store(const S (&x)[WIDTH], const Spot& spot) {
        constexpr int SIZE = WIDTH < QUAD ? WIDTH : QUAD;
        typedef Pack<T, SIZE> Whole;
#pragma unroll
        for (int q = 0; q < WIDTH; q += SIZE) {
            T* to = spot.column<T>(0) + (spot.at + Spot::offset(q));
            if (q + SIZE <= spot.live && (spot.aligned || (word)to % alignof(Whole) == 0)) {
                Whole pack;
#pragma unroll
                for (int i = 0; i < SIZE; ++i) pack.value[i] = store_as<T, S>(x[q + i]);
                store_pack(to, pack);
            } else
#pragma unroll
                for (int i = 0; i < SIZE; ++i)
                    if (q + i < spot.live) to[i] = store_as<T, S>(x[q + i]);
        }
    }
};

// The type of an element, for rules that ask how a list stores a number: of plain lists alone.
template <class F> struct Element { typedef F type; };
template <class T> struct Element<Plain<T>> { typedef T type; };

// The alignment that `aligned` promises of a format's columns: of a plain list, that of a quad.
template <class F> struct Aligned { static constexpr int bytes = 4; };
template <class T> struct Aligned<Plain<T>> { static constexpr int bytes = alignof(Pack<T, QUAD>); };

// Columns stand list by list; but of the first list, the parameter, all columns but one come last.
template <class First, class... Rest> __device__ __forceinline__ bool all_aligned(const word* address) {
    bool all = true;
    const auto check = [&](int columns, int bytes) {
        for (; columns; --columns) all = all && *address++ % bytes == 0;
    };
    check(1, Aligned<First>::bytes);
    (check(Rest::columns, Aligned<Rest>::bytes), ...);
    check(First::columns - 1, Aligned<First>::bytes);
    return all;
}

// Load the lists LIST, LIST + 1, … in the formats F, Rest…; spot.columns begins with the columns of F.
template <int LIST, class Rule, class S, int WIDTH, class F, class... Rest>
__device__ __forceinline__ void load_all(S (&in)[WIDTH][Rule::lists], Spot spot) {
    if constexpr ((Rule::reads >> LIST) & 1) {
        S x[WIDTH] = {};
        spot.input = LIST;
        spot.skipped = LIST ? 0 : (0 + ... + Rest::columns);
        F::template load<S, WIDTH>(x, spot);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) in[i][LIST] = x[i];
    }
    if constexpr (sizeof...(Rest) > 0) {
        spot.columns += LIST ? F::columns : 1;
        load_all<LIST + 1, Rule, S, WIDTH, Rest...>(in, spot);
    }
}

template <int LIST, class Rule, class S, int WIDTH, class F, class... Rest>
__device__ __forceinline__ void store_all(const S (&out)[WIDTH][Rule::outputs], Spot spot) {
    if constexpr ((Rule::writes >> LIST) & 1) {
        S x[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) x[i] = i < spot.live ? out[i][Rule::output_of(LIST)] : S(0);
        spot.input = LIST;
        spot.skipped = LIST ? 0 : (0 + ... + Rest::columns);
        F::template store<S, WIDTH>(x, spot);
    }
    if constexpr (sizeof...(Rest) > 0) {
        spot.columns += LIST ? F::columns : 1;
        store_all<LIST + 1, Rule, S, WIDTH, Rest...>(out, spot);
    }
}

template <class S, int COLUMNS, int UNIFORMS> struct BlockWork {
    Work<S, COLUMNS + 2, UNIFORMS> work;
    unsigned long long seed;
};

template <class S, class Rule, int WIDTH, class... F>
__device__ __forceinline__ void update_blocks(const S* u, const Spot& spot) {
    S in[WIDTH][Rule::lists], out[WIDTH][Rule::outputs];
    load_all<0, Rule, S, WIDTH, F...>(in, spot);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) Rule::template apply<S, typename Element<F>::type...>(in[i], u, out[i]);
    store_all<0, Rule, S, WIDTH, F...>(out, spot);
}

// One chunk, by one warp or block. All threads run every round, as formats may exchange values between them. Addresses
// and hyperparameters stay in shared memory: in registers they would leave fewer for elements on their way.
template <class S, class Rule, int THREADS, int WIDTH, int COLUMNS, class Table, class... F>
__device__ __forceinline__ void apply_blocks_to_chunk(
    BlockWork<S, COLUMNS, Rule::uniforms>& shared, const Table& table, long long item, int lane) {
    constexpr int STRIDE = Rule::uniforms + 1;
    if (lane < 32) {
        const long long set = fetch<STRIDE>(shared.work, table, item, lane);
        if (lane == 0)
            shared.seed = (unsigned long long)((const double*)table.data())[set * STRIDE + Rule::uniforms];
    }
    if constexpr (THREADS > 32) __syncthreads();
    else __syncwarp();

    constexpr int ROUND = THREADS * WIDTH;
    const long long most = table.header.chunk_numel;
    const int numel = (int)(shared.work.left < most ? shared.work.left : most);
    const int begin = lane / 32 * (32 * WIDTH) + lane % 32 * (WIDTH < QUAD ? WIDTH : QUAD);
    Spot spot;
    spot.columns = shared.work.address;
    spot.at = shared.work.offset + begin;
    spot.row = (long long)shared.work.address[COLUMNS];
    spot.index = (long long)shared.work.address[COLUMNS + 1] + spot.at;
    spot.seed = shared.seed;
    spot.next = ROUND;
    int round = 0;
    const auto next = [&] {
        round += ROUND;
        spot.at += ROUND;
        spot.index += ROUND;
    };
    if (all_aligned<F...>(shared.work.address)) {
        spot.aligned = true;
        spot.live = WIDTH;  // known to the compiler, which then leaves out all tests of the end
        for (; round + ROUND <= numel; next()) update_blocks<S, Rule, WIDTH, F...>(shared.work.u, spot);
    }
    spot.aligned = false;
    for (; round < numel; next()) {
        spot.live = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) spot.live += round + begin + Spot::offset(i) < numel;
        update_blocks<S, Rule, WIDTH, F...>(shared.work.u, spot);
    }
}

template <class S, class Rule, int THREADS, int WIDTH, class Table, class... F>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply_blocks(const __grid_constant__ Table table) {
    constexpr int COLUMNS = (F::columns + ...);
    __shared__ BlockWork<S, COLUMNS, Rule::uniforms> works[BLOCK / THREADS];
    const long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    if (item >= table.header.count) return;  // all threads of a chunk return together
    apply_blocks_to_chunk<S, Rule, THREADS, WIDTH, COLUMNS, Table, F...>(
        works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
}

template <class S, class Rule, int THREADS, int WIDTH, class Table, class... F>
__global__ void __launch_bounds__(BLOCK, 2) multi_tensor_apply_blocks_small_grid(const __grid_constant__ Table table) {
    constexpr int COLUMNS = (F::columns + ...);
    __shared__ BlockWork<S, COLUMNS, Rule::uniforms> works[BLOCK / THREADS];
    const long long stride = (long long)gridDim.x * (BLOCK / THREADS);
    long long item = (long long)blockIdx.x * (BLOCK / THREADS) + threadIdx.x / THREADS;
    for (; item < table.header.count; item += stride) {
        apply_blocks_to_chunk<S, Rule, THREADS, WIDTH, COLUMNS, Table, F...>(
            works[threadIdx.x / THREADS], table, item, threadIdx.x % THREADS);
        if constexpr (THREADS > 32) __syncthreads();  // the next fetch overwrites what this chunk reads
        else __syncwarp();
    }
}
