#include "bindings.h"

namespace maxrl::bindings {
namespace {

Formula make_formula(std::string_view kind, bool centred, std::string_view scale, double eps, std::int64_t ddof) {
  using namespace std::string_view_literals;
  return {
      choose<Kind>("kind", kind, {{"moments"sv, Kind::kMoments}, {"rank"sv, Kind::kRank}, {"binary"sv, Kind::kBinary}}),
      centred,
      choose<Scale>(
          "scale", scale,
          {{"one"sv, Scale::kOne}, {"leave_one_out"sv, Scale::kLeaveOneOut}, {"std"sv, Scale::kStd}, {"mean"sv, Scale::kMean}}),
      eps, ddof};
}

template <typename Reward, typename Advantage>
struct Types {
  using reward = Reward;
  using advantage = Advantage;
};

// Calls `use` with the element types of rewards and advantages for this dtype of rewards.
template <typename Use>
auto with_types(std::string_view dtype, const Use& use) {
  if (dtype == "float32") return use(Types<float, float>{});
  if (dtype == "float64") return use(Types<double, double>{});
  if (dtype == "bfloat16") return use(Types<BFloat16, BFloat16>{});
  if (dtype == "int32") return use(Types<std::int32_t, float>{});
  if (dtype == "int64") return use(Types<std::int64_t, float>{});
  if (dtype == "bool") return use(Types<bool, float>{});
  throw py::value_error("unknown dtype '" + std::string(dtype) + "'");
}

}  // namespace

void bind_group_advantage(py::module_& m) {
  py::class_<Formula>(m, "Formula")
      .def(py::init(&make_formula), py::kw_only(), "kind"_a, "centred"_a, "scale"_a, "eps"_a, "ddof"_a);
  py::class_<Groups>(m, "Groups")
      .def(py::init([](std::int64_t num_groups, std::int64_t group_size, std::int64_t num_rewards, Address offsets,
                       Address order, Address valid) {
             return Groups{num_groups,
                           group_size,
                           num_rewards,
                           pointer<const std::int64_t>(offsets),
                           pointer<const std::int64_t>(order),
                           pointer<const bool>(valid)};
           }),
           py::kw_only(), "num_groups"_a, "group_size"_a, "num_rewards"_a, "offsets"_a, "order"_a, "valid"_a)
      .def("distinct_sizes", &cpu::distinct_group_sizes);

  m.def(
      "group_advantage_cpu",
      [](std::string_view dtype, Address rewards, const Groups& groups, Address tables, Address table_starts,
         std::int64_t largest_table, const Formula& formula, Address advantages, int num_threads) {
        return with_types(dtype, [&](auto types) {
          const py::gil_scoped_release release;
          return cpu::group_advantage(pointer<const typename decltype(types)::reward>(rewards), groups,
                                      {pointer<const double>(tables), pointer<const std::int64_t>(table_starts), largest_table},
                                      formula, pointer<typename decltype(types)::advantage>(advantages), num_threads);
        });
      },
      py::kw_only(), "dtype"_a, "rewards"_a, "groups"_a, "tables"_a, "table_starts"_a, "largest_table"_a, "formula"_a,
      "advantages"_a, "num_threads"_a);

#ifdef MAXRL_FAST_CUDA
  m.def(
      "group_advantage_cuda",
      [](std::string_view dtype, Address rewards, const Groups& groups, Address tables, Address table_starts,
         std::int64_t largest_table, const Formula& formula, Address advantages, Address stream) {
        with_types(dtype, [&](auto types) {
          cuda::group_advantage(pointer<const typename decltype(types)::reward>(rewards), groups,
                                {pointer<const double>(tables), pointer<const std::int64_t>(table_starts), largest_table},
                                formula, pointer<typename decltype(types)::advantage>(advantages),
                                reinterpret_cast<cudaStream_t>(stream));
        });
      },
      py::kw_only(), "dtype"_a, "rewards"_a, "groups"_a, "tables"_a, "table_starts"_a, "largest_table"_a, "formula"_a,
      "advantages"_a, "stream"_a);
#endif
}

}  // namespace maxrl::bindings
