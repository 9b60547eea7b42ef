// A row of logits on a CPU: the log-probability and entropy that a loss needs, and the gradient in
// the logits from its gradients.
#pragma once
#include <algorithm>

#include "../token_loss.h"
#include "vectors.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace maxrl::cpu {

// Asks the operating system for huge pages: mapping a gradient of hundreds of megabytes in pages of
// 4 KiB takes longer than computing it. It may ignore this.
template <typename Element>
void advise_huge_pages([[maybe_unused]] Rows<Element> matrix, [[maybe_unused]] int64_t num_rows) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = 4096;
  constexpr int64_t kWorthwhile = 4 << 20;  // two huge pages
  const int64_t bytes = num_rows * matrix.stride * static_cast<int64_t>(sizeof(Element));
  if (bytes < kWorthwhile) return;
  const auto address = reinterpret_cast<uintptr_t>(matrix.data),
             first = (address + kPage - 1) / kPage * kPage;
  madvise(reinterpret_cast<void*>(first), address + bytes - first, MADV_HUGEPAGE);
#endif
}

constexpr int64_t kBlock = 2048;  // elements, which fit into the L1 cache
constexpr int64_t kLargestStep = 16;

// Elements of working memory that let SoftmaxRow compute the exponentials only once.
inline int64_t scratch_size(int64_t vocab_size) {
  return vocab_size + 2 * kLargestStep + vocab_size / kBlock + 2;
}

template <typename Vectors_, typename Element_>
class SoftmaxRow {
 public:
  using Vectors = Vectors_;
  using Element = Element_;
  using Real = typename Vectors::Real;

  // The row of token t.
  SoftmaxRow(const Element* logits, const TokenRows& in, int64_t t, Real* scratch)
      : logits_(logits), size_(in.vocab_size), target_(in.targets[t]),
        inverse_temperature_(static_cast<Real>(1.0 / in.temperature_of(t))), exponentials_(scratch),
        tops_(scratch ? scratch + size_ + 2 * kLargestStep : nullptr) {}

  // Reads the row once.
  Softmax statistics() {
    part_ = PartialSoftmax::empty();
    base_ = 0;
    for_blocks([&](const Block& block) { add_block(block); });
    const Softmax softmax(part_, to_double(logits_[target_]), inverse_temperature_);
    base_ = static_cast<Real>(softmax.top);
    return softmax;
  }

  // After statistics(): writes dL/dz, which may be where the logits are.
  void write_gradient(const Softmax& softmax, const RowGrads& grads, Element* gradient) const {
    const RowGradient row = softmax.gradient(grads);
    if (exponentials_ && row.slope == 0.0)
      for_blocks([&](const Block& block) {
        const Real factor = plain(static_cast<Real>(row.constant * factor_of(block, softmax)));
        for_steps(block, [&](int64_t i, int64_t count) {
          const Pair e = Vectors::load(exponentials_ + block.shift + i);
          write(gradient + i, count, {e.first * factor, e.second * factor});
        });
      });
    else
      for_blocks([&](const Block& block) {
        const Real constant = plain(static_cast<Real>(row.constant)),
                   slope = plain(static_cast<Real>(row.slope));
        const auto of = [&](Reals logits) {
          const Reals x = exponents(logits);
          return Vectors::exponential(x) * (constant + slope * x);
        };
        for_steps(block, [&](int64_t i, int64_t count) {
          const Pair z = read(logits_ + i, count);
          write(gradient + i, count, {of(z.first), of(z.second)});
        });
      });
    gradient[target_] = from_double<Element>(row.at_target);
  }

 private:
  using Reals = typename Vectors::Reals;
  using Pair = typename Vectors::Pair;
  static constexpr int64_t kStep = Vectors::kStep;
  static_assert(kStep <= kLargestStep && kBlock % kStep == 0);
  static constexpr Real kNothing = -std::numeric_limits<Real>::infinity();

  // A piece of the row before or after the target.
  struct Block {
    int64_t index, begin, end;
    int64_t shift;  // of its stored exponentials: the last step before the target is stored in full
  };
  template <typename Use>
  void for_blocks(const Use& use) const {
    int64_t index = 0;
    for (int64_t begin = 0; begin < target_; begin += kBlock)
      use(Block{index++, begin, std::min(begin + kBlock, target_), 0});
    for (int64_t begin = target_ + 1; begin < size_; begin += kBlock)
      use(Block{index++, begin, std::min(begin + kBlock, size_), kStep});
  }
  template <typename Use>  // use(i, count), with count < kStep possible in the last step
  static void for_steps(const Block& block, const Use& use) {
    int64_t i = block.begin;
    for (; i + kStep <= block.end; i += kStep) use(i, kStep);
    if (i < block.end) use(i, block.end - i);
  }
  static Pair read(const Element* from, int64_t count) {
    return count == kStep ? Vectors::load(from) : Vectors::load_some(from, count, kNothing);
  }
  static void write(Element* to, int64_t count, Pair x) {
    if (count == kStep)
      Vectors::store(to, x);
    else
      Vectors::store_some(to, count, x);
  }

  // A NaN whose bits rounding does not change into another number.
  static Real plain(Real x) { return x == x ? x : std::numeric_limits<Real>::quiet_NaN(); }

  // Exponents (z - base) / tau, raised to the lowest that exponential() takes. NaN stays NaN.
  Reals exponents(Reals z) const {
    const Reals x = (z - base_) * inverse_temperature_;
    return Vectors::greater(Vectors::all(Vectors::kLowestExponent), x);
  }

  // What the stored exponentials of a block are to be multiplied by, so that they are relative to
  // the greatest logit.
  double factor_of(const Block& block, const Softmax& softmax) const {
    return std::exp((static_cast<double>(tops_[block.index]) - softmax.top) * inverse_temperature_);
  }

  void add_block(const Block& block) {
    Pair top{Vectors::all(kNothing), Vectors::all(kNothing)};
    for_steps(block, [&](int64_t i, int64_t count) {
      const Pair z = read(logits_ + i, count);
      top = {Vectors::greater(top.first, z.first), Vectors::greater(top.second, z.second)};
    });
    const Real greatest = Vectors::greatest(Vectors::greater(top.first, top.second));
    if (greatest > part_.top) part_.raise(greatest, inverse_temperature_);
    base_ = static_cast<Real>(part_.base());
    if (tops_)
      tops_[block.index] = static_cast<Real>(
          part_.top);  // -inf, for a factor of 0, where there is no logit above it
    Pair sum{Vectors::all(0), Vectors::all(0)}, moment = sum;
    const auto add = [this](Reals z, Reals& sum_of, Reals& moment_of) {
      const Reals x = exponents(z), e = Vectors::exponential(x);
      sum_of += e;
      moment_of += e * x;
      return e;
    };
    for_steps(block, [&](int64_t i, int64_t count) {
      const Pair z = read(logits_ + i, count);
      const Pair e{add(z.first, sum.first, moment.first), add(z.second, sum.second, moment.second)};
      if (exponentials_) Vectors::store(exponentials_ + block.shift + i, e);
    });
    part_.others += Vectors::sum(sum.first + sum.second);
    part_.moment += Vectors::sum(moment.first + moment.second);
  }

  const Element* logits_;
  int64_t size_, target_;
  Real inverse_temperature_;
  Real*
      exponentials_;  // e^x by step, x relative to the greatest logit up to the block, tops_[block]
  Real* tops_;
  PartialSoftmax part_;
  Real base_;  // subtracted in exponents
};

}  // namespace maxrl::cpu
