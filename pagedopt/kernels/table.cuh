// The C++ side of tables/layout.py and of the arguments in transports/. All counts and offsets are 64-bit.

typedef unsigned long long word;

struct Header {
    long long rows;         // index of the first word of the rows
    long long chunks;       // index of the first word of the chunks; -1: chunk i is all of row i
    long long count;        // chunks in this launch
    long long chunk_numel;  // elements of a full chunk
};

struct Chunk {
    long long row, offset;
};

template <int LISTS> struct Row {
    word address[LISTS];
    long long numel;
    long long set;  // index of the set of hyperparameters
};

// A table in memory: managed, mapped, or copied to the device.
struct TableAt {
    const word* words;
    Header header;
    __device__ const word* data() const { return words; }
};

// A table that is passed by value, as the kernel's argument.
template <int BYTES> struct TableOf {
    Header header;
    word words[(BYTES - sizeof(Header)) / sizeof(word)];
    __device__ const word* data() const { return words; }
};

template <class Table> __device__ __forceinline__ Chunk chunk_of(const Table& table, long long item) {
    if (table.header.chunks < 0) return {item, 0};
    return ((const Chunk*)(table.data() + table.header.chunks))[item];
}
