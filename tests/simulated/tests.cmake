# Tests that run again on simulated GPUs, which tests/support/test_devices.hpp gives their ranks: on GPUs of their own,
# and two ranks on each. Of slow tests the worlds of two and three ranks are enough.
#
# Left out is what cannot run there, after the minus:
#   - texts that name a rank's device ("rank 1 (cpu)") are written for CPUs: Groups, Reducer.ParametersThatNoRank…
#   - tests whose bodies make tensors on the CPU, or compare with such: CommunicationHook.SixteenBits…, LocalSgd's state,
#     SyncBatchNorm.*, PowerSgd.WhatIsLeftOut…, CrossEntropy…, RankTrainer.*; so does all of parameter_server_test
#   - a state of the CPU's generator has another length than a GPU's: DropoutTraining…, ARanksGenerator…
#   - a GPU's step is taken before it is known not to be finite: OnNan.StopsAllRanksInTheSameStep…
#   - a run that fails frees what is under way, and nobody uses the memory again: Reducer.…Exception…, PowerSgd.Refuses…
#   - texts for CPUs that refuse a CUDA graph: Trainer.BadInput…
#   - a pipeline's times are not measured on GPUs: most of split_model_test and pipeline_cost_test
set(simulated_tests
  "in_process_test|*"
  "clip_grad_norm_test|Sizes/*"
  "communication_hook_test|Sizes/*-*SixteenBits*"
  "communication_test|Communication.*"
  "data_parallel_test|Sizes/*.*/2RanksMany:Sizes/*.*/3RanksOne:Sizes/*.*/2RanksAfterwards"
  "dropout_test|Sizes/*-*DropoutTraining*:*ARanksGenerator*"
  "grain_test|*"
  "grains_test|Seeds/*/0:Seeds/*/1:Seeds/*/2"
  "local_sgd_test|Sizes/*-*OuterMomentum*:*SendsTheParameters*"
  "mesh_test|*-Groups.*"
  "on_nan_test|OnNan*-*StopsAllRanksInTheSameStep*"
  "parallel_functions_test|Sizes/*-*CrossEntropy*:*DifferentiatedTwice*"
  "pipeline_test|Sizes/*.RandomNets*/2Ranks1F1B:Sizes/*.RandomNets*/2RanksInterleaved2:Sizes/*.RandomNets*/3RanksGPipe"
  "power_sgd_test|Sizes/*-*WhatIsLeftOut*"
  "reducer_test|Reducer.*-*Exception*:*ChannelsLast*:*NoRankUses*:*GrowsAfter*"
  "rank_trainer_test|RankTrainer.*-*ARecordedExchange*:*RunningStatistics*:*WeightsThatDiffer*"
  "resume_test|Resume.AStoppedRun*:Resume.WithTheOptimizersState:Resume.FromWithinAnEpoch*"
  "shard_test|Sizes/*.RandomNets*/2Ranks"
  "sharded_optimizer_test|Sizes/*.Updates*/2Ranks:Sizes/*.Accumulates*/3Ranks"
  "split_grains_test|*-*NoMeshOfDataAndPipeline*"
  "split_trainer_test|SplitTrainer.*"
  "storeys_test|*"
  "sync_batch_norm_test|Sizes/*.Layer*/2Ranks:Sizes/*.Nets*/3Ranks"
  "trainer_test|Trainer.GivesTheSame*:Trainer.Evaluates*:Trainer.ARequest*"
  "update_test|Update.*Clip*:Update.*Zero*:Update.*Sharded*")

set(simulated_environment "${test_environment}" "LD_PRELOAD=$<TARGET_FILE:simulated_device>")
foreach(way own shared)
  set(devices_own cuda:0,cuda:1,cuda:2,cuda:3)
  set(devices_shared cuda:0,cuda:0,cuda:1,cuda:1)
  foreach(entry ${simulated_tests})
    string(REGEX MATCH "^([^|]*)[|](.*)$" parts "${entry}")
    set(name ${CMAKE_MATCH_1}_on_${way}_gpus)
    add_test(NAME ${name} COMMAND ${${CMAKE_MATCH_1}_command} --gtest_filter=${CMAKE_MATCH_2})
    set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS simulated FAIL_REGULAR_EXPRESSION "Running 0 tests"
      ENVIRONMENT "${simulated_environment};LOCKSTEP_TEST_DEVICES=${devices_${way}}")
  endforeach()
endforeach()
foreach(name simulated_device_test cost_test)
  set_property(TEST ${name} PROPERTY ENVIRONMENT "${simulated_environment}")
endforeach()
if(TARGET lockstep_on_simulated_gpus)
  add_dependencies(simulated_tests lockstep_on_simulated_gpus)
  set_property(TEST simulated_program_test PROPERTY ENVIRONMENT
    "${simulated_environment}" "LOCKSTEP_PROGRAM=$<TARGET_FILE:lockstep_on_simulated_gpus>")
endif()
