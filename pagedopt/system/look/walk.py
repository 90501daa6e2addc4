"""The compiled look.  Numba compiles this text (see :func:`.parts.look`); nobody imports it.

:func:`look` compares groups, parameters, gradients and state, and only then writes: addresses of gradients and step
counts, then the launches.  The GIL is held throughout, except around
the driver's launch: no signal handler and no other Python thread comes between.  Nothing here can raise.

A record is one block of words, as :mod:`.record` lays it out; ``at`` is its address.
"""

from numba import njit

from pagedopt.system.look import words as w
from pagedopt.system.numba.foreign_calls import (
    ask,
    ask_for,
    ask_with_four,
    call_with,
    call_with_three,
    call_with_two,
    double_at,
    launch_kernel,
    let_go_of_the_gil,
    put_double,
    put_single,
    put_word,
    run_team,
    single_at,
    word_at,
)


@njit
def part(at, number):
    """Return a word of the parts of torch and CPython."""
    return word_at(word_at(at) + 8 * number)


@njit
def is_list(at, thing, length):
    """Return whether an object is a list of this length, and of no subclass."""
    return word_at(thing + 8) == part(at, w.LIST) and word_at(thing + 16) == length


@njit
def kernel(at, groups):
    """Return whether the groups hold the objects that they held; note their lists of parameters, and other values."""
    count = word_at(at + 8 * w.GROUPS)
    if not is_list(at, groups, count):
        return w.OTHER_ITEMS
    found = w.ALIKE
    cells, next_item = at + 8 * w.CELLS, part(at, w.DICT_NEXT)
    item = at + 8 * word_at(at + 8 * w.ITEMS_AT)
    for i in range(count):
        group, own = word_at(word_at(groups + 24) + 8 * i), at + 8 * (w.HEADER + w.GROUP * i)
        if word_at(group + 8) != part(at, w.DICT):
            return w.OTHER_ITEMS
        put_word(cells, 0)
        put_word(own + 24, 0)
        for j in range(word_at(own)):
            there = ask_with_four(next_item, group, cells, cells + 8, cells + 16)
            if there == 0 or word_at(cells + 8) != word_at(item):
                return w.OTHER_ITEMS
            value = word_at(cells + 16)
            if word_at(item + 8) == 0:
                if not is_list(at, value, word_at(own + 16)):
                    return w.OTHER_ITEMS
                put_word(own + 8, value)
            elif value != word_at(item + 8):
                put_word(own + 24, word_at(own + 24) + 1)
                put_word(own + 32, j)
                found = w.OTHER_VALUES
            item += 16
        if ask_with_four(next_item, group, cells, cells + 8, cells + 16) != 0:
            return w.OTHER_ITEMS
    return found


@njit
def number(at, function, tensor):
    """Return the int32 that torch tells of a tensor; -1 if it refuses."""
    cells = at + 8 * w.CELLS
    put_word(cells, 0)
    return word_at(cells) if ask_for(part(at, function), tensor, cells) == 0 else -1


@njit
def pointer(at, function, tensor):
    """Return the pointer, or int64, that torch tells of a tensor; -1 if it refuses."""
    cells = at + 8 * w.CELLS
    return word_at(cells) if ask_for(part(at, function), tensor, cells) == 0 else -1


@njit
def fits(at, tensor, dimensions, sizes, kind, write):
    """Return whether a tensor has the dtype, sizes and strides that it had; ``write``: note them.

    ``kind`` is the address of a word for the dtype, and one for each stride.
    """
    dtype = number(at, w.GET_DTYPE, tensor)
    if pointer(at, w.GET_DIM, tensor) != dimensions or dtype < 0:
        return False
    if write:
        put_word(kind, dtype)
    elif dtype != word_at(kind):
        return False
    lengths, steps = pointer(at, w.GET_SIZES, tensor), pointer(at, w.GET_STRIDES, tensor)
    if lengths == -1 or steps == -1:
        return False
    for i in range(8, 8 * dimensions + 8, 8):
        length, step = word_at(lengths + i - 8), word_at(steps + i - 8)
        if write:
            put_word(sizes + i - 8, length)
            put_word(kind + i, step)
        elif length != word_at(sizes + i - 8) or step != word_at(kind + i):
            return False
    return ask(part(at, w.IS_NEG), tensor) == 0


@njit
def param(at, row, device, write):
    """Compare a parameter that takes the step, and its gradient, with their row; ``write``: fill the row."""
    tensor, dimensions = word_at(row + 8 * w.ID) + part(at, w.OFFSET), word_at(row + 8 * w.DIMENSIONS)
    sizes = at + 8 * word_at(row + 8 * w.LAYOUT_AT)  # then a dtype and strides of the parameter, and of the gradient
    own = sizes + 8 * dimensions
    if not fits(at, tensor, dimensions, sizes, own, write) or ask(part(at, w.IS_INFERENCE), tensor) != 0:
        return False
    address = pointer(at, w.GET_DATA_PTR, tensor)
    grad = call_with(part(at, w.GRAD), word_at(tensor))
    if word_at(grad) == part(at, w.UNDEFINED):
        return False
    if part(at, w.GET_LAYOUT) != 0 and number(at, w.GET_LAYOUT, grad) != part(at, w.STRIDED):
        return False  # torch 2.6 does not tell; there a sparse tensor refuses to tell its strides
    if not fits(at, grad, dimensions, sizes, own + 8 * (1 + dimensions), write):
        return False
    type_of_device, index = number(at, w.GET_DEVICE_TYPE, grad), number(at, w.GET_DEVICE_INDEX, grad)
    if write:
        put_word(device, type_of_device)
        put_word(device + 8, index)
    elif type_of_device != word_at(device) or index != word_at(device + 8):
        return False
    lies = pointer(at, w.GET_DATA_PTR, grad)
    put_word(row + 8 * w.NOW, lies)
    there = lies >= w.LOW or (lies == 0 and address == 0)
    if not there:  # a view into a freed storage has its offset as its address; a heap may lie as low
        there = lies != 0 and pointer(at, w.GET_STORAGE_SIZE, grad) > 0
    return there and address != -1 and address == word_at(row + 8 * w.ADDRESS)


@njit
def params(at, write):
    """Compare all parameters and their gradients; return SAME, or what is new."""
    row = at + 8 * word_at(at + 8 * w.ROWS_AT)
    launches = at + 8 * word_at(at + 8 * w.LAUNCHES_AT)
    for i in range(word_at(at + 8 * w.GROUPS)):
        own = at + 8 * (w.HEADER + w.GROUP * i)
        things = word_at(word_at(own + 8) + 24)
        for j in range(word_at(own + 16)):
            thing = word_at(things + 8 * j)
            if thing != word_at(row + 8 * w.ID) or word_at(thing + 8) != word_at(row + 8 * w.TYPE):
                return w.ANEW
            if word_at(row + 8 * w.PRESENT) == 0:
                grad = call_with(part(at, w.GRAD), word_at(thing + part(at, w.OFFSET)))
                if word_at(grad) != part(at, w.UNDEFINED):
                    return w.CHANGED
            elif not param(at, row, launches + 8 * (w.LAUNCH * word_at(row + 8 * w.LAUNCH_OF) + w.DEVICE), write):
                return w.CHANGED
            row += 8 * w.ROW
    return w.SAME


@njit
def entries(at, state):
    """Compare the keys of ``optimizer.state``, its values and their addresses; return SAME or ANEW."""
    cells, offset = at + 8 * w.CELLS, part(at, w.OFFSET)
    next_item, get_item, tensor, parameter = (
        part(at, w.DICT_NEXT),
        part(at, w.DICT_GET),
        part(at, w.TENSOR),
        part(at, w.PARAM),
    )
    key = at + 8 * word_at(at + 8 * w.KEYS_AT)
    value = at + 8 * word_at(at + 8 * w.VALUES_AT)
    put_word(cells + 24, 0)
    for _ in range(word_at(at + 8 * w.KEYS)):
        found = ask_with_four(next_item, state, cells + 24, cells + 32, cells + 40)
        if found == 0 or word_at(cells + 32) != word_at(key):
            return w.ANEW
        entry = word_at(cells + 40)
        for _ in range(word_at(key + 8)):
            thing = call_with_two(get_item, entry, word_at(value))
            if thing != word_at(value + 8):
                return w.ANEW
            kind = word_at(thing + 8)
            if kind != tensor and kind != parameter:
                return w.ANEW
            if pointer(at, w.GET_DATA_PTR, thing + offset) != word_at(value + 16):
                return w.ANEW
            value += 24
        key += 16
    return w.ANEW if ask_with_four(next_item, state, cells + 24, cells + 32, cells + 40) != 0 else w.SAME


@njit
def counts_hold(at):
    """Return whether step counts that all must be one less than the new value are so."""
    entry = at + 8 * word_at(at + 8 * w.COUNTS_AT)
    for _ in range(word_at(at + 8 * w.COUNTS)):
        if word_at(entry + 48) != 0:
            wide, address, now = word_at(entry + 8) == 8, word_at(entry + 16), double_at(word_at(entry + 24)) - 1
            for i in range(word_at(entry)):
                where = word_at(address + 8 * i)
                if (double_at(where) if wide else single_at(where)) != now:
                    return False
        entry += 8 * w.COUNT
    return True


@njit
def put_number(at, wide, address, value):
    """Write a number of a parameter's own."""
    if wide:
        put_double(address, value)
    else:
        put_single(address, value)


@njit
def count(at, undo):
    """Write the new numbers of all parameters; ``undo``: what was there before."""
    entry = at + 8 * word_at(at + 8 * w.COUNTS_AT)
    for _ in range(word_at(at + 8 * w.COUNTS)):
        wide, step = word_at(entry + 8) == 8, word_at(entry + 32)
        address, coming, before = word_at(entry + 16), word_at(entry + 24), word_at(entry + 40)
        for i in range(word_at(entry)):
            where = word_at(address + 8 * i)
            if undo:
                put_number(at, wide, where, double_at(before + 8 * i))
            else:
                put_double(before + 8 * i, double_at(where) if wide else single_at(where))
                put_number(at, wide, where, double_at(coming + 8 * i * step))
        entry += 8 * w.COUNT


@njit
def raise_versions(at):
    """Raise the version counters of parameters that take the step, and of state."""
    bump, offset = part(at, w.BUMP_VERSION), part(at, w.OFFSET)
    row = at + 8 * word_at(at + 8 * w.ROWS_AT)
    for _ in range(word_at(at + 8 * w.ROWS)):
        if word_at(row + 8 * w.PRESENT) != 0:
            call_with(bump, word_at(row + 8 * w.ID) + offset)
        row += 8 * w.ROW
    counter = at + 8 * word_at(at + 8 * w.COUNTERS_AT)
    for i in range(word_at(at + 8 * w.COUNTERS)):
        call_with(bump, word_at(counter + 8 * i) + offset)


@njit
def put_addresses(at):
    """Write the addresses of gradients that lie elsewhere now into their tables; return False if a table is read."""
    launches = at + 8 * word_at(at + 8 * w.LAUNCHES_AT)
    for writes in range(2):  # first look whether all may be written
        row = at + 8 * word_at(at + 8 * w.ROWS_AT)
        for _ in range(word_at(at + 8 * w.ROWS)):
            if word_at(row + 8 * w.PRESENT) != 0:
                lies = word_at(row + 8 * w.NOW)
                if lies != word_at(word_at(row + 8 * w.STORED_AT)):
                    launch = launches + 8 * w.LAUNCH * word_at(row + 8 * w.LAUNCH_OF)
                    if word_at(launch + 8 * w.IN_FLIGHT) != 0:
                        return False
                    if writes == 1:
                        put_word(word_at(row + 8 * w.STORED_AT), lies)
                        put_word(word_at(row + 8 * w.CELL_AT), lies)
                        put_word(launch + 8 * w.MOVED, 1)
            row += 8 * w.ROW
    return True


@njit
def launch_all(at):
    """Launch; return DONE, or what the driver says (its error, and how many launches came before)."""
    row = at + 8 * word_at(at + 8 * w.LAUNCHES_AT)
    for i in range(word_at(at + 8 * w.LAUNCHES)):
        if word_at(row + 8 * w.DEVICE) == part(at, w.CPU):
            if word_at(row + 8 * w.THREADS) > 1:
                run_team(part(at, w.TEAM), word_at(row), word_at(row + 8 * w.ARGUMENT), word_at(row + 8 * w.THREADS))
            else:
                call_with(word_at(row), word_at(row + 8 * w.ARGUMENT))
        else:
            nbytes = word_at(row + 8 * w.STALE)
            if word_at(row + 8 * w.MOVED) != 0:
                nbytes = max(nbytes, word_at(row + 8 * w.ROWS_END))
            if nbytes > 0:
                call_with_three(part(at, w.MEMCPY), word_at(row + 8 * w.TARGET), word_at(row + 8 * w.SOURCE), nbytes)
            stream = word_at(row + 8 * w.STREAM)
            thread = let_go_of_the_gil(part(at, w.LET_GO))  # a full queue waits, perhaps for a callback in Python
            error = launch_kernel(
                part(at, w.LAUNCH_KERNEL), word_at(row), word_at(row + 8 * w.BLOCKS), word_at(row + 8 * w.THREADS),
                stream, row + 8 * w.ARGUMENT,
            )  # fmt: skip
            refused = error != 0
            if not refused:
                error = ask_for(part(at, w.EVENT_RECORD), word_at(row + 8 * w.EVENT), stream)
            call_with(part(at, w.TAKE_BACK), thread)
            if error != 0:
                return error + (1 if refused and i == 0 else 2) * w.REFUSED
        row += 8 * w.LAUNCH
    return w.DONE


@njit
def look(at, groups, state):
    """Look, launch and count; return DONE, or why not: then nothing is changed, unless a launch came before."""
    if ask(part(at, w.HAS_CALLBACKS), 0) != 0:
        return w.PROFILED
    if kernel(at, groups) != w.ALIKE:
        return w.GROUPS_DIFFER
    found = params(at, False)
    if found == w.SAME:
        found = entries(at, state)
    if found != w.SAME:
        return found
    if not counts_hold(at):
        return w.COUNTS_DIFFER
    if not put_addresses(at):
        return w.IN_USE
    count(at, False)
    raise_versions(at)
    found = launch_all(at)
    if found // w.REFUSED == 1:
        count(at, True)
    return found


@njit
def same_state(at, state):
    """Return whether state is where it was."""
    return entries(at, state) == w.SAME


@njit
def note(at):
    """Fill the rows of a record with what parameters and gradients are now; return whether that can be compared."""
    return params(at, True) == w.SAME


@njit
def undefined_of(at, thing):
    """Return what the gradient of a tensor is; of one without a gradient, that is torch's undefined tensor."""
    return word_at(call_with(part(at, w.GRAD), word_at(thing + part(at, w.OFFSET))))


@njit
def told(at, thing, function):
    """Return the int32 that torch tells of a tensor object."""
    return number(at, function, thing + part(at, w.OFFSET))
