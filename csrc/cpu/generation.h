// Sampling of all responses of a job on a CPU. Each prompt is computed once, and so is what samples
// of a prompt begin with alike; a finished response frees its slot for the next.
#pragma once
#include <memory>
#include <vector>

#include "decoder.h"

namespace maxrl::cpu {

class Generation {
 public:
  // The job's arrays and the decoder must outlive this object.
  Generation(const Decoder& decoder, const GenerationJob& job);

  // Runs whole steps for about this long; returns whether all responses are done.
  bool run(double seconds);

  const GenerationStatistics& statistics() const { return statistics_; }

 private:
  struct Prompt {
    std::unique_ptr<KeyValueCache> cache;
    std::vector<float> logits;  // of the last token, until all samples have their first token
    int64_t unfinished;
  };
  // The samples order_[begin] to order_[end - 1] of a prompt, which have the same `length` tokens
  // so far: one forward pass is for all of them.
  struct Row {
    int64_t begin, end, length;
    KeyValueCache* cache;
  };

  void admit();
  void prefill(int64_t begin, int64_t end);
  void decode();
  // Samples the next token of each of the row's samples.
  void append_tokens(Row& row, const float* logits, Workspace& workspace);
  // Splits rows whose samples drew different tokens, removes samples that are done and frees their
  // slots.
  void regroup();
  int64_t prompt_of(const Row& row) const { return row.begin / job_.num_samples; }
  int64_t last_token(int64_t sample, int64_t length) const {
    return job_.responses[sample * job_.max_new_tokens + length - 1];
  }
  int64_t prompt_length(int64_t prompt) const {
    return job_.cu_seqlens[prompt + 1] - job_.cu_seqlens[prompt];
  }

  const Decoder& decoder_;
  const GenerationJob job_;
  std::vector<Prompt> prompts_;
  // A slot for each active sample, of which a row uses one: when it splits, others are free.
  std::vector<std::unique_ptr<KeyValueCache>> slots_;
  std::vector<KeyValueCache*> free_caches_;
  std::vector<int64_t> order_;  // [S], all samples; those of a prompt stay in its range
  std::vector<Row> rows_, rows_before_;  // rows of a prompt are adjacent
  std::vector<Workspace> workspaces_;
  int64_t next_sample_ = 0,
          next_prompt_ = 0;  // the first sample and the first prompt that are still waiting
  int64_t active_ = 0;  // samples in rows_
  int64_t cache_bytes_ = 0;
  GenerationStatistics statistics_{};
};

}  // namespace maxrl::cpu
