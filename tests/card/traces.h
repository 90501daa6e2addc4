// What a kernel touches between two addresses: g++ -fsanitize=thread calls one of these before each access.
#include <stdlib.h>

namespace traces {
struct Access {
    unsigned long long at, size;
};
struct List {
    Access* all;
    long long count, room;
} read, written;
unsigned long long begin, end;

__attribute__((no_sanitize("thread"))) static inline void note(List& list, void* at, unsigned long long size) {
    const unsigned long long address = (unsigned long long)at;
    if (address < begin || address >= end) return;
    if (list.count == list.room) {
        list.room = list.room ? 2 * list.room : 4096;
        list.all = (Access*)realloc(list.all, list.room * sizeof(Access));
    }
    list.all[list.count].at = address;
    list.all[list.count++].size = size;
}
}  // namespace traces

extern "C" {
void traces_between(unsigned long long begin, unsigned long long end) {
    traces::begin = begin;
    traces::end = end;
    traces::read.count = traces::written.count = 0;
}
const traces::List* traces_read() { return &traces::read; }
const traces::List* traces_written() { return &traces::written; }

#define NOTED(size) \
    void __tsan_read##size(void* at) { traces::note(traces::read, at, size); } \
    void __tsan_write##size(void* at) { traces::note(traces::written, at, size); } \
    void __tsan_unaligned_read##size(void* at) { traces::note(traces::read, at, size); } \
    void __tsan_unaligned_write##size(void* at) { traces::note(traces::written, at, size); }
NOTED(1)
NOTED(2)
NOTED(4)
NOTED(8)
NOTED(16)
void __tsan_read_range(void* at, unsigned long long size) { traces::note(traces::read, at, size); }
void __tsan_write_range(void* at, unsigned long long size) { traces::note(traces::written, at, size); }
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
}
