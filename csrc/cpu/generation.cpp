#include "generation.h"

#include <omp.h>

#include <algorithm>
#include <chrono>

#include "../random.h"
#include "sample.h"

namespace maxrl::cpu {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Generation::Generation(const Decoder& decoder, const GenerationJob& job)
    : decoder_(decoder), job_(job), prompts_(job.num_prompts), workspaces_(job.num_threads) {
  int64_t longest = 0;
  for (int64_t p = 0; p < job.num_prompts; ++p) longest = std::max(longest, prompt_length(p));
  const DecoderSizes& sizes = decoder.sizes();
  const int64_t num_slots = std::min(job.num_slots, job.num_prompts * job.num_samples);
  for (int64_t s = 0; s < num_slots; ++s) {
    slots_.push_back(std::make_unique<KeyValueCache>(sizes, job.max_new_tokens));
    free_caches_.push_back(slots_.back().get());
  }
  cache_bytes_ = num_slots * KeyValueCache::bytes(sizes, job.max_new_tokens);
  rows_.reserve(num_slots);
  for (Workspace& workspace : workspaces_) {
    decoder.prepare(workspace, longest, job.max_new_tokens);
    workspace.probabilities.resize(sizes.vocab);
    workspace.order.resize(sizes.vocab);
  }
}

bool Generation::run(double seconds) {
  const double deadline = now() + seconds;
  do {
    admit();
    // Rows are also empty if all admitted samples ended with their first token.
    if (rows_.empty()) return next_sample_ == job_.num_prompts * job_.num_samples;
    decode();
  } while (now() < deadline);
  return false;
}

// Admits waiting samples into free slots, into at least a quarter of all slots at a time, because
// small batches cost more per token.
void Generation::admit() {
  const double start = now();
  const int64_t waiting = job_.num_prompts * job_.num_samples - next_sample_;
  const auto num_slots = static_cast<int64_t>(slots_.size());
  const int64_t count = std::min(waiting, num_slots - num_active_);
  if (count == 0 || (!rows_.empty() && 4 * (num_slots - num_active_) < num_slots)) return;
  const size_t old = rows_.size();
  for (int64_t i = 0; i < count; ++i, ++next_sample_, ++num_active_) {
    if (rows_.size() == old || next_sample_ % job_.num_samples == 0) {
      rows_.push_back({{}, 0, free_caches_.back()});
      free_caches_.pop_back();
    }
    rows_.back().samples.push_back(next_sample_);
  }
  prefill(next_prompt_, prompt_of(rows_.back()) + 1);
#pragma omp parallel for num_threads(job_.num_threads) schedule(static)
  for (size_t i = old; i < rows_.size(); ++i)
    append_tokens(rows_[i], prompts_[prompt_of(rows_[i])].logits.data(),
                  workspaces_[omp_get_thread_num()]);
  regroup();
  statistics_.prefill_seconds += now() - start;
}

// Each prompt runs on one thread.
void Generation::prefill(int64_t begin, int64_t end) {
  const DecoderSizes& sizes = decoder_.sizes();
  for (int64_t p = begin; p < end; ++p) {
    prompts_[p] = {std::make_unique<KeyValueCache>(sizes, prompt_length(p)),
                   std::vector<float>(sizes.vocab), job_.num_samples};
    cache_bytes_ += KeyValueCache::bytes(sizes, prompt_length(p));
    statistics_.prompt_tokens += prompt_length(p);
  }
  statistics_.peak_cache_bytes = std::max(statistics_.peak_cache_bytes, cache_bytes_);
#pragma omp parallel for num_threads(job_.num_threads) schedule(dynamic, 1)
  for (int64_t p = begin; p < end; ++p) {
    Workspace& workspace = workspaces_[omp_get_thread_num()];
    const int64_t length = prompt_length(p);
    DecoderRow rows[Decoder::kMaxRows];
    for (int64_t first = 0; first < length; first += Decoder::kMaxRows) {
      const int64_t count = std::min(Decoder::kMaxRows, length - first);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = first + i;
        rows[i] = {job_.tokens[job_.cu_seqlens[p] + position],
                   position,
                   prompts_[p].cache.get(),
                   position + 1,
                   nullptr,
                   0};
      }
      const bool is_last = first + count == length;
      decoder_.forward(rows, count, is_last ? count - 1 : count, workspace);
    }
    std::copy_n(workspace.logits.data(), sizes.vocab, prompts_[p].logits.data());
  }
  next_prompt_ = std::max(next_prompt_, end);
}

void Generation::decode() {
  const double start = now();
  const auto num_rows = static_cast<int64_t>(rows_.size());
  // Split the batch into equal pieces, one per thread; several per thread if a piece would exceed
  // kMaxRows.
  const int64_t rounds = (num_rows + job_.num_threads * Decoder::kMaxRows - 1) /
                         (job_.num_threads * Decoder::kMaxRows);
  const int64_t pieces = std::min(num_rows, rounds * job_.num_threads);
#pragma omp parallel for num_threads(job_.num_threads) schedule(dynamic, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    const int64_t begin = piece * num_rows / pieces, end = (piece + 1) * num_rows / pieces;
    Workspace& workspace = workspaces_[omp_get_thread_num()];
    DecoderRow rows[Decoder::kMaxRows];
    for (int64_t i = begin; i < end; ++i) {
      const Row& row = rows_[i];
      const int64_t prompt = prompt_of(row), length = prompt_length(prompt);
      rows[i - begin] = {last_token(row.samples.front(), row.length),
                         length + row.length - 1,
                         prompts_[prompt].cache.get(),
                         length,
                         row.cache,
                         row.length};
    }
    decoder_.forward(rows, end - begin, 0, workspace);
    for (int64_t i = begin; i < end; ++i)
      append_tokens(rows_[i],
                    workspace.logits.data() + (i - begin) * row_stride(decoder_.sizes().vocab),
                    workspace);
  }
  ++statistics_.steps;
  statistics_.decoded_rows += num_rows;
  regroup();
  statistics_.decode_seconds += now() - start;
}

void Generation::append_tokens(Row& row, const float* logits, Workspace& workspace) const {
  const Distribution next(logits, decoder_.sizes().vocab, job_.sampling,
                          workspace.probabilities.data(), workspace.order.data());
  for (const int64_t sample : row.samples) {
    const Sampled sampled = next.draw(uniform(job_.keys[sample], row.length));
    const int64_t at = sample * job_.max_new_tokens + row.length;
    job_.responses[at] = sampled.token;
    job_.logprobs[at] = sampled.logprob;
  }
  ++row.length;
}

bool Generation::is_done(int64_t sample, int64_t length) const {
  const auto& stop_ids = job_.sampling.stop_ids;
  const bool stopped =
      std::find(stop_ids.begin(), stop_ids.end(), last_token(sample, length)) != stop_ids.end();
  job_.lengths[sample] = length;
  job_.truncated[sample] = !stopped;
  return stopped || length == job_.max_new_tokens;
}

void Generation::regroup() {
  struct Copy {
    const KeyValueCache* from;
    KeyValueCache* to;
    int64_t length;
  };
  std::vector<Copy> copies;
  std::vector<Row> regrouped;
  regrouped.reserve(slots_.size());
  for (Row& row : rows_) {
    const int64_t prompt = prompt_of(row), length = row.length;
    const auto num_before = static_cast<int64_t>(row.samples.size());
    row.samples.erase(std::remove_if(row.samples.begin(), row.samples.end(),
                                     [&](int64_t sample) { return is_done(sample, length); }),
                      row.samples.end());
    const auto num_left = static_cast<int64_t>(row.samples.size());
    num_active_ -= num_before - num_left;
    prompts_[prompt].unfinished -= num_before - num_left;
    if (prompts_[prompt].unfinished == 0) {
      cache_bytes_ -= KeyValueCache::bytes(decoder_.sizes(), prompt_length(prompt));
      prompts_[prompt] = {};
    }
    if (num_left == 0) {
      free_caches_.push_back(row.cache);
      continue;
    }
    // The samples that drew the first one's token stay a row. Its cache has all tokens but the
    // last.
    std::vector<int64_t> others;
    for (KeyValueCache* cache = row.cache; !row.samples.empty(); row.samples.swap(others)) {
      const int64_t token = last_token(row.samples.front(), length);
      const auto same = [&](int64_t sample) { return last_token(sample, length) == token; };
      const auto first_other = std::stable_partition(row.samples.begin(), row.samples.end(), same);
      others.assign(first_other, row.samples.end());
      row.samples.erase(first_other, row.samples.end());
      regrouped.push_back({std::move(row.samples), length, cache});
      row.samples.clear();
      if (others.empty()) break;
      cache = free_caches_.back();
      free_caches_.pop_back();
      copies.push_back({row.cache, cache, length - 1});
    }
  }
  rows_ = std::move(regrouped);
  const auto num_copies = static_cast<int64_t>(copies.size());
#pragma omp parallel for num_threads(job_.num_threads) schedule(static)
  for (int64_t i = 0; i < num_copies; ++i) copies[i].to->copy(*copies[i].from, copies[i].length);
}

}  // namespace maxrl::cpu
