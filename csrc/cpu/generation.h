// Sampling of all responses of a job on a CPU. Each prompt is computed once; a finished response
// frees its slot for the next.
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
  struct Row {  // an active response
    int64_t sample, length;
    KeyValueCache* cache;
  };

  void admit();
  void prefill(int64_t begin, int64_t end);
  void decode();
  void append_token(Row& row, const float* logits,
                    Workspace& workspace) const;  // samples the next token
  bool is_done(const Row& row) const;
  void finish();  // removes rows that are done and frees their slots
  int64_t prompt_of(const Row& row) const { return row.sample / job_.num_samples; }
  int64_t prompt_length(int64_t prompt) const {
    return job_.cu_seqlens[prompt + 1] - job_.cu_seqlens[prompt];
  }

  const Decoder& decoder_;
  const GenerationJob job_;
  std::vector<Prompt> prompts_;
  std::vector<std::unique_ptr<KeyValueCache>> slots_;
  std::vector<KeyValueCache*> free_slots_;
  std::vector<Row> rows_;  // in order of the samples, so that the rows of a prompt are adjacent
  std::vector<Workspace> workspaces_;
  int64_t next_sample_ = 0,
          next_prompt_ = 0;  // the first sample and the first prompt that are still waiting
  int64_t cache_bytes_ = 0;
  GenerationStatistics statistics_{};
};

}  // namespace maxrl::cpu
