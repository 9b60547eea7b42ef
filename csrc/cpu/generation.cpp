#include "generation.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <stdexcept>

#include "../random.h"
#include "sample.h"

namespace maxrl::cpu {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Generation::Generation(Decoder& decoder, const GenerationJob& job)
    : decoder_(decoder), job_(job), prompts_(job.num_prompts),
      order_(job.num_prompts * job.num_samples), workspaces_(job.num_threads),
      waiting_(job.max_turns ? order_.size() : 0) {
  int64_t longest = 0;
  for (int64_t p = 0; p < job.num_prompts; ++p) longest = std::max(longest, prompt_length(p));
  const DecoderSizes& sizes = decoder.sizes();
  const int64_t num_slots = std::min(job.num_slots, job.num_prompts * job.num_samples);
  for (int64_t s = 0; s < num_slots; ++s) {
    slots_.push_back(std::make_unique<KeyValueCache>(sizes, job.max_new_tokens));
    free_caches_.push_back(slots_.back().get());
  }
  cache_bytes_ = num_slots * KeyValueCache::bytes(sizes, job.max_new_tokens) + decoder.kept_bytes;
  rows_.reserve(num_slots);
  rows_before_.reserve(num_slots);
  std::iota(order_.begin(), order_.end(), int64_t{0});
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
    read();
    // Rows are also empty if all admitted samples ended with their first token.
    if (rows_.empty()) return active_ == 0 && next_sample_ == job_.num_prompts * job_.num_samples;
    decode();
  } while (turns_.empty() && now() < deadline);
  return false;
}

bool Generation::all_wait() const {
  return rows_.empty() && active_ > 0 &&
         (active_ == static_cast<int64_t>(slots_.size()) ||
          next_sample_ == job_.num_prompts * job_.num_samples);
}

void Generation::feed(int64_t sample, const std::vector<int64_t>& tokens) {
  if (sample < 0 || sample >= static_cast<int64_t>(waiting_.size()) || !waiting_[sample].cache)
    throw std::invalid_argument("feed: the sample does not wait");
  const auto count = static_cast<int64_t>(tokens.size()), length = job_.lengths[sample];
  if (count && length + count >= job_.max_new_tokens)
    throw std::invalid_argument("feed: the tokens leave no room to sample more");
  KeyValueCache* const cache = std::exchange(waiting_[sample].cache, nullptr);
  if (count == 0) {
    free_caches_.push_back(cache);
    finish(sample / job_.num_samples, 1);
    return;
  }
  std::copy(tokens.begin(), tokens.end(), job_.responses + sample * job_.max_new_tokens + length);
  const int64_t place = waiting_[sample].place;
  fed_.push_back({{place, place + 1, length + count, cache}, length});
}

// Admits waiting samples into free slots, into at least a quarter of all slots at a time, because
// small batches cost more per token.
void Generation::admit() {
  const double start = now();
  const int64_t waiting = job_.num_prompts * job_.num_samples - next_sample_;
  const int64_t num_slots = static_cast<int64_t>(slots_.size()), free = num_slots - active_;
  const int64_t last = next_sample_ + std::min(waiting, free);
  if (last == next_sample_ || (!rows_.empty() && 4 * free < num_slots)) return;
  active_ += last - next_sample_;
  const size_t old = rows_.size();
  while (next_sample_ < last) {  // all admitted samples of a prompt begin as one row
    const int64_t prompt_end = (next_sample_ / job_.num_samples + 1) * job_.num_samples;
    rows_.push_back({next_sample_, std::min(prompt_end, last), 0, free_caches_.back()});
    free_caches_.pop_back();
    next_sample_ = rows_.back().end;
  }
  prefill(next_prompt_, prompt_of(rows_.back()) + 1);
#pragma omp parallel for num_threads(job_.num_threads) schedule(static)
  for (size_t i = old; i < rows_.size(); ++i)
    append_tokens(rows_[i], prompts_[prompt_of(rows_[i])].logits.data(),
                  workspaces_[omp_get_thread_num()]);
  regroup();
  statistics_.prefill_seconds += now() - start;
}

// Each prompt runs on one thread, unless the decoder has kept it.
void Generation::prefill(int64_t begin, int64_t end) {
  const DecoderSizes& sizes = decoder_.sizes();
  for (int64_t p = begin; p < end; ++p) {
    const int64_t bytes = KeyValueCache::bytes(sizes, prompt_length(p));
    prompts_[p].unfinished = job_.num_samples;
    const auto kept = decoder_.kept.find(prompt_tokens(p));
    if (kept != decoder_.kept.end()) {
      static_cast<PromptState&>(prompts_[p]) = std::move(kept->second);
      decoder_.kept.erase(kept);
      decoder_.kept_bytes -= bytes;
      continue;
    }
    prompts_[p].cache = std::make_unique<KeyValueCache>(sizes, prompt_length(p));
    cache_bytes_ += bytes;
  }
  statistics_.peak_cache_bytes = std::max(statistics_.peak_cache_bytes, cache_bytes_);
#pragma omp parallel for num_threads(job_.num_threads) schedule(dynamic, 1)
  for (int64_t p = begin; p < end; ++p) {
    if (!prompts_[p].logits.empty()) continue;
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
    const float* const logits = workspace.logits.as<float>();
    prompts_[p].logits.assign(logits, logits + sizes.vocab);
  }
  next_prompt_ = std::max(next_prompt_, end);
}

// Computes the keys and values of the turn's last token and of the tokens that were fed, except the
// last one, from which `decode` samples. Each thread reads whole insertions, in order, several in
// one forward pass.
void Generation::read() {
  if (fed_.empty()) return;
  const double start = now();
  const auto count = static_cast<int64_t>(fed_.size());
  const int64_t pieces = std::min<int64_t>(count, job_.num_threads);
#pragma omp parallel for num_threads(job_.num_threads) schedule(static, 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    Workspace& workspace = workspaces_[omp_get_thread_num()];
    DecoderRow rows[Decoder::kMaxRows];
    int64_t num_rows = 0;
    for (int64_t i = piece * count / pieces; i < (piece + 1) * count / pieces; ++i)
      for (int64_t length = fed_[i].length; length < fed_[i].row.length; ++length) {
        if (num_rows == Decoder::kMaxRows) {
          decoder_.forward(rows, num_rows, num_rows, workspace);
          num_rows = 0;
        }
        rows[num_rows++] = reading(fed_[i].row, length);
      }
    decoder_.forward(rows, num_rows, num_rows, workspace);
  }
  // Not before: `admit` ends rows whose last token is a stop token, which a reply's may be.
  for (const Fed& fed : fed_) rows_.push_back(fed.row);
  std::sort(rows_.begin(), rows_.end(),
            [](const Row& a, const Row& b) { return a.begin < b.begin; });
  fed_.clear();
  statistics_.prefill_seconds += now() - start;
}

DecoderRow Generation::reading(const Row& row, int64_t length) const {
  const int64_t prompt = prompt_of(row), prefix_length = prompt_length(prompt);
  return {last_token(order_[row.begin], length),
          prefix_length + length - 1,
          prompts_[prompt].cache.get(),
          prefix_length,
          row.cache,
          length};
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
    for (int64_t i = begin; i < end; ++i) rows[i - begin] = reading(rows_[i], rows_[i].length);
    decoder_.forward(rows, end - begin, 0, workspace);
    for (int64_t i = begin; i < end; ++i)
      append_tokens(rows_[i],
                    workspace.logits.as<float>() + (i - begin) * row_stride(decoder_.sizes().vocab),
                    workspace);
  }
  ++statistics_.steps;
  statistics_.decoded_rows += num_rows;
  regroup();
  statistics_.decode_seconds += now() - start;
}

// Each sample draws with its own key. In ascending order of their random numbers, all samples are
// drawn in one pass, and those that drew the same token are adjacent.
void Generation::append_tokens(Row& row, const float* logits, Workspace& workspace) {
  const auto random = [&](int64_t sample) { return uniform(job_.keys[sample], row.length); };
  const auto begin = order_.begin() + row.begin, end = order_.begin() + row.end;
  std::sort(begin, end, [&](int64_t a, int64_t b) { return random(a) < random(b); });
  Draws draws(logits, decoder_.sizes().vocab, job_.sampling, workspace.probabilities.data(),
              workspace.order.data());
  for (auto sample = begin; sample != end; ++sample) {
    const Sampled sampled = draws.at(random(*sample));
    const int64_t at = *sample * job_.max_new_tokens + row.length;
    job_.responses[at] = sampled.token;
    job_.logprobs[at] = sampled.logprob;
  }
  ++row.length;
}

void Generation::regroup() {
  struct Copy {
    const KeyValueCache* from;
    KeyValueCache* to;
    int64_t positions;
  };
  std::vector<Copy> copies;
  const auto& stop_ids = job_.sampling.stop_ids;
  rows_.swap(rows_before_);
  rows_.clear();
  for (const Row& row : rows_before_) {
    KeyValueCache* own = row.cache;  // until a part of the row has it
    const auto take = [&] {
      if (own) return std::exchange(own, nullptr);
      copies.push_back({row.cache, free_caches_.back(), row.length - 1});
      free_caches_.pop_back();
      return copies.back().to;
    };
    for (int64_t begin = row.begin, end; begin < row.end; begin = end) {
      const int64_t token = last_token(order_[begin], row.length);
      for (end = begin + 1; end < row.end && last_token(order_[end], row.length) == token;) ++end;
      const bool stopped = std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end();
      if (!stopped && row.length < job_.max_new_tokens) {
        rows_.push_back({begin, end, row.length, take()});
        continue;
      }
      int64_t done = end - begin;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t sample = order_[i];
        job_.lengths[sample] = row.length;
        job_.truncated[sample] = !stopped;
        if (!stopped || !job_.max_turns) continue;
        turns_.push_back(sample);
        if (++waiting_[sample].num_turns == job_.max_turns) continue;
        waiting_[sample].cache = take();
        waiting_[sample].place = i;
        --done;
      }
      finish(prompt_of(row), done);
    }
    if (own != nullptr) free_caches_.push_back(own);
  }
#pragma omp parallel for num_threads(job_.num_threads) schedule(dynamic, 1) if (copies.size() > 1)
  for (size_t i = 0; i < copies.size(); ++i)
    copies[i].to->copy(*copies[i].from, copies[i].positions);
}

void Generation::finish(int64_t prompt, int64_t count) {
  active_ -= count;
  if ((prompts_[prompt].unfinished -= count) > 0) return;
  const int64_t bytes = KeyValueCache::bytes(decoder_.sizes(), prompt_length(prompt));
  PromptState state = std::move(prompts_[prompt]);
  if (decoder_.kept_bytes + bytes <= job_.max_kept_bytes &&
      decoder_.kept.try_emplace(prompt_tokens(prompt), std::move(state)).second)
    decoder_.kept_bytes += bytes;
  else
    cache_bytes_ -= bytes;
}

}  // namespace maxrl::cpu
