"""Where the words of a record and of the parts lie, for :mod:`.record` and for the compiled look."""

#: What a look finds.  All but DONE mean that nothing was changed; from REFUSED on the driver's error is added to once
#: REFUSED (the first launch was refused, nothing is changed) or twice (a launch came before).
DONE, ANEW, CHANGED, PROFILED, IN_USE, GROUPS_DIFFER, COUNTS_DIFFER = range(7)
SAME = 0
REFUSED = 1 << 20

#: Below this address a tensor's memory is doubtful.
LOW = 1 << 33

# --- parts of torch and CPython: numbers, then addresses of functions -------------------------------------------------
(
    OFFSET, UNDEFINED, STRIDED, CPU, LIST, DICT, TENSOR, PARAM,
    GRAD, GET_SIZES, GET_STRIDES, GET_DIM, GET_DTYPE, GET_DATA_PTR, GET_DEVICE_TYPE, GET_DEVICE_INDEX, GET_LAYOUT,
    GET_STORAGE_SIZE,
    IS_NEG, IS_INFERENCE, BUMP_VERSION, HAS_CALLBACKS,
    DICT_NEXT, DICT_GET, LET_GO, TAKE_BACK, MEMCPY, TEAM, LAUNCH_KERNEL, EVENT_RECORD,
) = range(30)  # fmt: skip
PARTS = 30

# --- header of a record: where its sections begin (in words), and how many entries they have --------------------------
(
    PARTS_AT, CELLS, _1, _2, _3, _4, _5, GROUPS, ITEMS_AT, ROWS_AT, ROWS, LAUNCHES_AT, LAUNCHES, KEYS_AT, KEYS,
    VALUES_AT, COUNTS_AT, COUNTS, COUNTERS_AT, COUNTERS,
) = range(20)  # fmt: skip
HEADER = 20

#: What a comparison of groups finds.
ALIKE, OTHER_VALUES, OTHER_ITEMS = range(3)

#: A group: number of items, its list of parameters, how many of these, how many values are other ones, which was the
#: last of those.  All but the first and third are noted by the look.
GROUP = 5
#: A parameter.
(ID, TYPE, PRESENT, ADDRESS, DIMENSIONS, LAYOUT_AT, LAUNCH_OF, CELL_AT, STORED_AT, NOW) = range(10)
ROW = 10
#: A launch; the kernel stands first.
(KERNEL, ARGUMENT, THREADS, DEVICE, INDEX, BLOCKS, STREAM, EVENT, TARGET, SOURCE, STALE, ROWS_END, MOVED, IN_FLIGHT) = (
    range(14)
)
LAUNCH = 14
#: Numbers of one name: how many, bytes of one; where their addresses and new values lie; 1 if each has a value of its
#: own, 0 if all have the same; where the old values lie; 1 if all must now be one less than the new value.
COUNT = 7
