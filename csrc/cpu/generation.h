// Samples all responses of a job on a CPU. Prompts are computed once; a response that ends frees its slot for the next one.
#pragma once
#include <memory>
#include <vector>

#include "decoder.h"

namespace maxrl::cpu {

class Generation {
 public:
  // The arrays of the job, and the decoder, must outlive this object.
  Generation(const Decoder& decoder, const GenerationJob& job, int num_threads);

  // Runs whole steps for about this long; returns whether all responses are done.
  bool run(double seconds);

  const GenerationStatistics& statistics() const { return statistics_; }

  // Bytes of the cache of a prompt or a response of this length.
  static int64_t cache_bytes(const DecoderSizes& sizes, int64_t length) { return KeyValueCache::bytes(sizes, length); }

 private:
  struct Prompt {
    std::unique_ptr<KeyValueCache> cache;
    std::vector<float> logits;  // of its last token, from which its samples take their first token
    int64_t unfinished;
  };
  struct Row {  // a response that is being sampled
    int64_t sample, length;
    KeyValueCache* cache;
  };

  void admit();
  void prefill(int64_t begin, int64_t end);
  void decode();
  void choose(Row& row, const float* logits, Workspace& workspace) const;  // its next token
  bool is_done(const Row& row) const;
  void drop_finished();
  int64_t prompt_of(const Row& row) const { return row.sample / job_.num_samples; }
  int64_t prompt_length(int64_t prompt) const { return job_.cu_seqlens[prompt + 1] - job_.cu_seqlens[prompt]; }

  const Decoder& decoder_;
  const GenerationJob job_;
  const int num_threads_;
  std::vector<Prompt> prompts_;
  std::vector<std::unique_ptr<KeyValueCache>> slots_;
  std::vector<KeyValueCache*> free_slots_;
  std::vector<Row> rows_;  // ordered by sample, so that rows of one prompt are adjacent
  std::vector<Workspace> workspaces_;
  int64_t next_sample_ = 0, next_prompt_ = 0;  // the first that is not admitted, the first that is not computed
  int64_t cache_bytes_ = 0;
  GenerationStatistics statistics_{};
};

}  // namespace maxrl::cpu
