// Sampling of all responses of a job on a CPU. What samples of a prompt begin with is computed
// once; a finished response frees its slot for the next.
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
  struct Row {  // active samples of one prompt with the same tokens so far
    std::vector<int64_t> samples;  // ascending
    int64_t length;                // tokens of each sample
    KeyValueCache* cache;          // of all of them but the last
  };

  void admit();
  void prefill(int64_t begin, int64_t end);
  void decode();
  // Each sample of the row draws its next token.
  void append_tokens(Row& row, const float* logits, Workspace& workspace) const;
  bool is_done(int64_t sample, int64_t length) const;
  // Removes samples that are done, and gives those of a row that drew another token a row.
  void regroup();
  int64_t last_token(int64_t sample, int64_t length) const {
    return job_.responses[sample * job_.max_new_tokens + length - 1];
  }
  int64_t prompt_of(const Row& row) const { return row.samples.front() / job_.num_samples; }
  int64_t prompt_length(int64_t prompt) const {
    return job_.cu_seqlens[prompt + 1] - job_.cu_seqlens[prompt];
  }

  const Decoder& decoder_;
  const GenerationJob job_;
  std::vector<Prompt> prompts_;
  std::vector<std::unique_ptr<KeyValueCache>> slots_;
  std::vector<KeyValueCache*> free_caches_;
  std::vector<Row> rows_;  // the rows of a prompt are adjacent
  std::vector<Workspace> workspaces_;
  int64_t num_active_ = 0;  // samples; each has a slot, so that a row that splits finds a cache
  int64_t next_sample_ = 0,
          next_prompt_ = 0;  // the first sample and the first prompt that are still waiting
  int64_t cache_bytes_ = 0;
  GenerationStatistics statistics_{};
};

}  // namespace maxrl::cpu
