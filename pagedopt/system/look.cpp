// One compiled call that looks at an optimizer, launches its step and counts it, over ATen's and CPython's public API.
//
// step() compares groups, parameters, gradients and state with what was noted, and only then writes: addresses of
// gradients, versions and step counts; then it launches.  The GIL is held throughout, but around the driver's launches.
#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <dlfcn.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <unordered_set>

namespace py = pybind11;
using Words = std::vector<int64_t>;

// What a step finds; build.py has the same numbers.
enum { DONE, ANEW, LONG, IN_USE, REFUSED = 1 << 20 };

static at::TensorImpl* impl(PyObject* tensor) { return THPVariable_Unpack(tensor).unsafeGetTensorImpl(); }
// TensorImpl::data() and not data_ptr(): that one throws where there is no memory.
static int64_t address(const at::TensorImpl* t) { return reinterpret_cast<int64_t>(t->data()); }
// A lazy clone shares its memory until somebody writes through data_ptr(), which nobody calls here.
static bool is_shared(const at::TensorImpl* t) { return c10::impl::cow::is_cow_data_ptr(t->storage().data_ptr()); }
static int64_t* words(int64_t at) { return reinterpret_cast<int64_t*>(at); }

// Values that cannot change while they are the same object.
struct Fixed {
  std::unordered_set<PyObject*> types;
  bool has(PyObject* value) const {
    if (!PyTuple_CheckExact(value)) return types.count(reinterpret_cast<PyObject*>(Py_TYPE(value))) > 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); i++)
      if (!has(PyTuple_GET_ITEM(value, i))) return false;
    return true;
  }
};

static void* driver(const char* name) {  // its function; none where there is no NVIDIA driver
  static void* library = dlopen("libcuda.so.1", RTLD_LAZY);
  return library ? dlsym(library, name) : nullptr;
}

struct Layout {  // dtype, sizes and strides; the latter lie one behind the other in an array
  at::ScalarType dtype;
  size_t dim, at;
  Layout(const at::TensorImpl* t, Words& extents)
      : dtype(c10::typeMetaToScalarType(t->dtype())), dim(t->sizes().size()), at(extents.size()) {
    extents.insert(extents.end(), t->sizes().begin(), t->sizes().end());
    extents.insert(extents.end(), t->strides().begin(), t->strides().end());
  }
  bool fits(const at::TensorImpl* t, const Words& extents) const {
    auto *sizes = extents.data() + at, *strides = sizes + dim;
    return c10::typeMetaToScalarType(t->dtype()) == dtype && t->sizes().size() == dim &&
        std::equal(sizes, strides, t->sizes().data()) && std::equal(strides, strides + dim, t->strides().data()) &&
        !t->key_set().has(c10::DispatchKey::Negative);
  }
};

struct Launch {  // blocks 0: on a CPU
  void *kernel = nullptr, *argument = nullptr, *event = nullptr, *target = nullptr, *source = nullptr;
  int64_t threads = 1, blocks = 0, stale = 0, rows_end = 0;
  bool in_flight = false, moves = false;  // moves: words of the table are other ones, or would have to be
};
struct Item { py::object key, value; bool any; };  // of a group; no value: its list of parameters; any: no step reads it
struct Group { std::vector<Item> items; size_t params = 0; PyObject* list = nullptr; };
struct Cell { Launch* launch; int64_t *word, *copy; };  // a word of a table that holds a gradient's address
struct Row {  // a parameter; no launch: without a gradient
  PyObject* id;
  PyTypeObject* type;
  int64_t address, now;
  Cell update, square;
  c10::Device device;
  std::vector<Layout> layouts;
};
struct Value { py::object name; PyObject* id; int64_t address; Layout layout; };
struct Key { PyObject* id; std::vector<Value> values; };
struct Numbers {  // of one name, in one launch; one_more: all must be one less than what comes
  int64_t itemsize;
  Words at;
  std::vector<double> coming, before;
  bool one_more = false;
  double get(size_t i) const {
    return itemsize == 8 ? *reinterpret_cast<double*>(at[i]) : *reinterpret_cast<float*>(at[i]);
  }
  void put(size_t i, double x) const {
    if (itemsize == 8) *reinterpret_cast<double*>(at[i]) = x;
    else *reinterpret_cast<float*>(at[i]) = float(x);
  }
};
struct Factor { double coefficient, max_norm, norm; float scale, found_inf; };  // of factor.cuh

class Look {
 public:
  Look(py::list groups, const std::vector<std::array<int64_t, 6>>& rows, size_t launches, size_t squares, py::dict state,
       const std::vector<std::vector<py::object>>& names, const std::vector<std::pair<int64_t, Words>>& numbers,
       const std::vector<py::object>& counters, py::iterable types, int64_t team)
      : launches(squares + launches), squares(squares), counters(counters), team(reinterpret_cast<Team>(team)) {
    for (auto type : types) fixed.types.insert(type.ptr());
    size_t r = 0;
    for (auto each : groups) {
      Group group;
      for (auto item : py::cast<py::dict>(each)) {
        auto key = py::reinterpret_borrow<py::object>(item.first), value = py::reinterpret_borrow<py::object>(item.second);
        auto name = py::isinstance<py::str>(key) ? key.cast<std::string>() : "";
        bool any = name == "param_names";
        if (name != "params") {
          if (!any && !fixed.has(value.ptr())) throw py::type_error("a value that may change while it is the same object");
          group.items.push_back({key, value, any});
          continue;
        }
        group.items.push_back({key, py::object(), false});
        for (auto p : py::cast<py::list>(value)) note(p.ptr(), rows.at(r++));
        group.params = py::len(value);
      }
      this->groups.push_back(std::move(group));
    }
    size_t k = 0;
    for (auto item : state) {
      Key key{item.first.ptr(), {}};
      for (auto& name : names.at(k++)) {
        auto value = py::cast<py::dict>(item.second)[name].cast<py::object>();
        check(value.ptr());
        auto* t = impl(value.ptr());
        key.values.push_back({name, value.ptr(), address(t), Layout(t, extents)});
      }
      keys.push_back(std::move(key));
    }
    for (auto& counter : counters) check(counter.ptr());
    for (auto& [itemsize, at] : numbers) {
      std::vector<double> zeros(at.size());
      this->numbers.push_back({itemsize, at, zeros, zeros});
    }
  }

  void clip_with(int64_t sums, size_t count, int64_t factor) {
    this->sums = reinterpret_cast<double*>(sums), this->count = count, this->factor = reinterpret_cast<Factor*>(factor);
  }

  // The values of groups that are other ones now, which are taken over; None: keys, or lists of parameters, differ.
  py::object take(py::handle now) {
    if (!same_items(now.ptr())) return py::none();
    struct New { size_t group; Item* item; py::object value; };
    std::vector<New> news;  // made without a call of Python, which might edit the groups meanwhile
    PyObject *key, *value;
    for (size_t i = 0; i < groups.size(); i++) {
      Py_ssize_t at = 0;
      for (auto& item : groups[i].items) {
        PyDict_Next(PyList_GET_ITEM(now.ptr(), i), &at, &key, &value);
        if (!item.value || value == item.value.ptr()) continue;
        if (!item.any && !fixed.has(value)) return py::none();
        news.push_back({i, &item, py::reinterpret_borrow<py::object>(value)});
      }
    }
    for (auto& each : news) std::swap(each.item->value, each.value);  // the old ones die behind the loop
    py::list found;
    for (auto& each : news) found.append(py::make_tuple(each.group, each.item->key, each.item->value));
    return std::move(found);
  }

  void set_number(size_t i, double coming, bool one_more) {
    auto& n = numbers.at(i);
    std::fill(n.coming.begin(), n.coming.end(), coming);
    n.one_more = one_more;
  }
  void set_numbers(size_t i, const std::vector<double>& coming) {
    auto& n = numbers.at(i);
    if (coming.size() != n.at.size()) throw py::value_error("another count of numbers");
    n.coming = coming, n.one_more = false;
  }
  Launch& launch(size_t i) { return launches.at(i); }  // those of squares first
  void launch_on(int64_t stream) { this->stream = reinterpret_cast<void*>(stream); }

  bool same_state(py::handle state) const { return compare(state) == SAME; }
  bool other_layout(py::handle state) const { return compare(state) == OTHER_LAYOUT; }  // of the same state, there

  // Look, launch and count.  DONE; or nothing is changed: ANEW, this look is of no use any more; LONG, this step needs
  // more than it; IN_USE, a kernel may still read a buffer whose table would change.  From REFUSED on the driver's error
  // is added to once REFUSED (nothing is changed) or twice.
  int64_t step(py::handle now, py::handle state) {
    if (at::hasCallbacks()) return LONG;  // a profiler
    if (!same_items(now.ptr()) || !same_values(now.ptr()) || !same_parameters() || !same_state(state)) return ANEW;
    for (auto& n : numbers)
      for (size_t i = 0; n.one_more && i < n.at.size(); i++)
        if (n.get(i) != n.coming[i] - 1) return LONG;
    if (!write_addresses()) return IN_USE;
    if (factor && !clip()) return LONG;
    for (auto& row : rows)
      if (row.update.launch) impl(row.id)->bump_version();
    for (auto& counter : counters) impl(counter.ptr())->bump_version();
    for (auto& n : numbers)
      for (size_t i = 0; i < n.at.size(); i++) { n.before[i] = n.get(i); n.put(i, n.coming[i]); }
    auto [error, begun] = launch_all();
    if (!error) return DONE;
    if (begun || !same_state(state)) return error + 2 * REFUSED;  // others ran meanwhile: counts may have died
    for (auto& n : numbers)
      for (size_t i = 0; i < n.at.size(); i++) n.put(i, n.before[i]);
    return error + REFUSED;
  }

 private:
  using Team = void (*)(void*, void*, unsigned, unsigned);
  std::vector<Group> groups;
  std::vector<Row> rows;
  std::vector<Key> keys;
  Words extents;
  std::vector<Numbers> numbers;
  std::vector<Launch> launches;
  size_t squares;
  std::vector<py::object> counters;
  Fixed fixed;
  Team team;
  double* sums = nullptr;
  size_t count = 0;
  Factor* factor = nullptr;  // on a CPU, and where gradients are clipped
  void* stream = nullptr;

  static void check(PyObject* t) {
    if (!THPVariable_CheckExact(t)) throw py::type_error("a subclass of Tensor");
    if (impl(t)->is_inference()) throw py::type_error("a tensor without a version");
  }

  enum Found { SAME, OTHER, OTHER_LAYOUT };
  Found compare(py::handle state) const {
    PyObject *key, *entry;
    Py_ssize_t at = 0;
    if (!PyDict_Check(state.ptr()) || size_t(PyDict_Size(state.ptr())) != keys.size()) return OTHER;
    for (auto& of : keys) {
      if (!PyDict_Next(state.ptr(), &at, &key, &entry) || key != of.id) return OTHER;
      if (!of.values.empty() && !PyDict_Check(entry)) return OTHER;
      for (auto& value : of.values) {
        auto* now = PyDict_GetItemWithError(entry, value.name.ptr());
        if (now == nullptr) PyErr_Clear();
        if (now == nullptr || now != value.id || !THPVariable_CheckExact(now)) return OTHER;
        auto* t = impl(now);
        if (address(t) != value.address || is_shared(t)) return OTHER;
        if (!value.layout.fits(t, extents)) return OTHER_LAYOUT;
      }
    }
    return SAME;
  }

  void note(PyObject* p, const std::array<int64_t, 6>& of) {
    auto [launch, at, cell, stored, square, square_cell] = of;
    check(p);
    Row row{p, Py_TYPE(p), at, 0, {}, {}, c10::Device(c10::kCPU), {}};
    if (launch >= 0) {
      auto* t = impl(p);
      if (!t->grad().defined()) throw py::type_error("a gradient that is gone");
      auto* grad = t->grad().unsafeGetTensorImpl();
      row.layouts = {Layout(t, extents), Layout(grad, extents)};
      row.device = grad->device();
      row.update = {&launches.at(squares + launch), words(cell), words(stored)};
      if (square >= 0) row.square = {&launches.at(square), words(square_cell), words(square_cell)};
    }
    rows.push_back(std::move(row));
  }

  bool same_items(PyObject* now) {  // the same keys, and lists of as many parameters
    if (!PyList_CheckExact(now) || size_t(PyList_GET_SIZE(now)) != groups.size()) return false;
    for (size_t i = 0; i < groups.size(); i++) {
      PyObject *group = PyList_GET_ITEM(now, i), *key, *value;
      Py_ssize_t at = 0;
      if (!PyDict_CheckExact(group) || size_t(PyDict_Size(group)) != groups[i].items.size()) return false;
      for (auto& item : groups[i].items) {
        if (!PyDict_Next(group, &at, &key, &value) || key != item.key.ptr()) return false;
        if (item.value) continue;
        if (!PyList_CheckExact(value) || size_t(PyList_GET_SIZE(value)) != groups[i].params) return false;
        groups[i].list = value;
      }
    }
    return true;
  }
  bool same_values(PyObject* now) const {
    for (size_t i = 0; i < groups.size(); i++) {
      PyObject *key, *value;
      Py_ssize_t at = 0;
      for (auto& item : groups[i].items) {
        PyDict_Next(PyList_GET_ITEM(now, i), &at, &key, &value);
        if (item.value && value != item.value.ptr()) return false;
      }
    }
    return true;
  }
  bool same_parameters() {
    auto row = rows.begin();
    for (auto& group : groups)
      for (size_t j = 0; j < group.params; j++, row++) {
        auto* thing = PyList_GET_ITEM(group.list, j);
        if (thing != row->id || Py_TYPE(thing) != row->type) return false;
        auto* t = impl(thing);
        auto& grad = t->grad();
        if (grad.defined() != bool(row->update.launch)) return false;
        if (grad.defined() && !fits(*row, t, grad.unsafeGetTensorImpl())) return false;
      }
    return true;
  }
  bool fits(Row& row, at::TensorImpl* t, const at::TensorImpl* grad) const {
    if (grad->layout() != c10::kStrided || grad->device() != row.device || t->is_inference()) return false;
    if (!row.layouts[0].fits(t, extents) || !row.layouts[1].fits(grad, extents)) return false;
    if (address(t) != row.address || is_shared(t)) return false;
    row.now = address(grad);
    return row.now == 0 ? row.address == 0 : grad->storage().nbytes() > 0;  // of a freed storage the offset is left
  }

  template <class Act>
  void for_cells(Act act) {  // that hold another address than today's
    for (auto& row : rows) {
      if (row.update.launch && *row.update.copy != row.now) act(row, row.update);
      if (row.square.launch && *row.square.word != row.now) act(row, row.square);  // perhaps alone, behind an interrupt
    }
  }
  bool write_addresses() {  // false: a kernel may still read such a table
    bool free = true;
    for_cells([&](Row&, Cell& cell) { cell.launch->moves = true, free = free && !cell.launch->in_flight; });
    if (free) for_cells([](Row& row, Cell& cell) { *cell.copy = *cell.word = row.now; });
    return free;
  }

  bool clip() {  // on a CPU, in the order of sums.cu; false: a thread found no memory
    std::fill_n(sums, count, 0.0);  // no kernel runs over what is absent
    for (size_t i = 0; i < squares; i++) {
      run(launches[i]);
      if (auto& failed = static_cast<int64_t*>(launches[i].argument)[4]; failed) { failed = 0; return false; }
    }
    double found[512] = {};
    for (size_t i = 0; i < count; i++) found[i % 512] += sums[i];
    for (size_t left = 256; left; left /= 2)
      for (size_t j = 0; j < left; j++) found[j] = found[2 * j] + found[2 * j + 1];
    factor->norm = std::sqrt(found[0]) / double(factor->scale);
    auto coefficient = factor->max_norm / (factor->norm + 1e-6);
    factor->coefficient = coefficient > 1.0 ? 1.0 : coefficient;  // NaN stays
    return true;
  }
  void run(const Launch& l) const {
    if (l.threads > 1) team(l.kernel, l.argument, unsigned(l.threads), 0);
    else reinterpret_cast<void (*)(void*)>(l.kernel)(l.argument);
  }

  std::pair<int, bool> launch_all() {  // the driver's error, and whether an update has begun
    bool begun = false;
    for (size_t i = factor ? squares : 0; i < launches.size(); i++) {
      if (auto& l = launches[i]; l.blocks) {
        auto [error, refused] = on_card(l);
        begun = begun || (!refused && i >= squares);
        if (error) return {error, begun};
      } else {
        run(l);
      }
    }
    return {0, true};
  }
  std::pair<int, bool> on_card(Launch& l) const {
    using Kernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
    static auto launch = reinterpret_cast<Kernel>(driver("cuLaunchKernel"));
    static auto record = reinterpret_cast<int (*)(void*, void*)>(driver("cuEventRecord"));
    if (auto nbytes = l.moves ? std::max(l.stale, l.rows_end) : l.stale; nbytes > 0) memcpy(l.target, l.source, nbytes);
    py::gil_scoped_release others;  // a full queue waits, perhaps for a callback in Python
    auto refused = launch(l.kernel, unsigned(l.blocks), 1, 1, unsigned(l.threads), 1, 1, 0, stream, &l.argument, nullptr);
    return {refused || !l.event ? refused : record(l.event, stream), refused != 0};
  }
};

// Calls of the driver with arguments that stay the same: at most four numbers, handles or addresses.
class Calls {
 public:
  explicit Calls(const std::vector<py::tuple>& named) {
    for (auto& each : named) {
      auto name = each[0].cast<std::string>();
      Call call{reinterpret_cast<Function>(driver(name.c_str())), {}};
      if (!call.function || each.size() > 5) throw py::value_error("no such call of the driver: " + name);
      for (size_t i = 1; i < each.size(); i++) call.with[i - 1] = each[i].cast<uint64_t>();
      calls.push_back(call);
    }
  }
  std::pair<size_t, int> make() const {  // which was refused, and the driver's error; 0: none
    py::gil_scoped_release others;  // a full queue waits
    for (size_t i = 0; i < calls.size(); i++)
      if (auto& [function, with] = calls[i]; int error = function(with[0], with[1], with[2], with[3])) return {i, error};
    return {calls.size(), 0};
  }

 private:
  using Function = int (*)(uint64_t, uint64_t, uint64_t, uint64_t);
  struct Call { Function function; std::array<uint64_t, 4> with; };
  std::vector<Call> calls;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("finds_driver", [] { return driver("cuLaunchKernel") != nullptr && driver("cuEventRecord") != nullptr; });
  auto pointer = [](auto member) { return [member](Launch& l, int64_t at) { l.*member = words(at); }; };
  py::class_<Launch>(m, "Launch", py::module_local())
      .def_property("kernel", nullptr, pointer(&Launch::kernel)).def_property("argument", nullptr, pointer(&Launch::argument))
      .def_property("event", nullptr, pointer(&Launch::event)).def_property("target", nullptr, pointer(&Launch::target))
      .def_property("source", nullptr, pointer(&Launch::source))
      .def_readwrite("threads", &Launch::threads).def_readwrite("blocks", &Launch::blocks)
      .def_readwrite("stale", &Launch::stale).def_readwrite("rows_end", &Launch::rows_end)
      .def_readwrite("in_flight", &Launch::in_flight).def_readwrite("moves", &Launch::moves);
  py::class_<Calls>(m, "Calls", py::module_local())
      .def(py::init<const std::vector<py::tuple>&>()).def("make", &Calls::make);
  py::class_<Look>(m, "Look", py::module_local())
      .def(py::init<py::list, const std::vector<std::array<int64_t, 6>>&, size_t, size_t, py::dict,
                    const std::vector<std::vector<py::object>>&, const std::vector<std::pair<int64_t, Words>>&,
                    const std::vector<py::object>&, py::iterable, int64_t>())
      .def("launch", &Look::launch, py::return_value_policy::reference_internal).def("launch_on", &Look::launch_on)
      .def("clip_with", &Look::clip_with).def("take", &Look::take).def("set_number", &Look::set_number)
      .def("set_numbers", &Look::set_numbers).def("same_state", &Look::same_state)
      .def("other_layout", &Look::other_layout).def("step", &Look::step);
}
