# Tests that run again on simulated GPUs, which tests/support/test_devices.hpp gives their ranks: the worlds {0}, {0, 1}
# and {0, 1, 2, 3} on GPUs of their own, {0, 0} and {0, 0, 1} where ranks share one. Of slow tests the worlds of two and
# three ranks are enough, and of trainings one of both ways. A build with CUDA runs them on the GPUs that are there, as
# part of ctest -L gpu, or says that there are none.
#
# A line is a file, a filter, and the only way if there is one. Left out is what cannot run there, after the minus:
#   - texts that name a rank's device ("rank 1 (cpu)") are written for CPUs: Groups, Reducer.ParametersThatNoRank…,
#     check_replicas_test
#   - kernels that the simulated device cannot call: ParallelLayersWorlds.Convolutions…
#   - tests whose bodies make tensors on the CPU, or compare with such: some RankTrainer.*, SplitModelTest.AMeanOverSome…
#     and …SyncBatchNorms…, SplitGrainsTest.…SharedGenerator…, and sharded_gradients_test, shard_traffic_test,
#     lifetimes_test, grain_statistics_test, running_statistics_test, pipeline_mail_test, pipeline_errors_test,
#     data_parallel_misuse_test, rank_test and in_process_meetings_test
#   - sparse tensors: ParameterServerWorlds.Sparse…
#   - a state of the CPU's generator has another length than a GPU's: DropoutTraining…, ARanksGenerator…
#   - a run that fails frees what is under way, and nobody uses the memory again: Reducer.…Exception…, PowerSgd.Refuses…
#   - a gradient that grows while its bucket is averaged is a race, besides being the error that is told:
#     Reducer.…GrowsAfter…
#   - texts for CPUs that refuse a CUDA graph: Trainer.BadInput…
#   - hundreds of small steps take a minute there: Communication.…WithinAnEpoch…, SplitTrainer.Learns…; a ResNet is slow:
#     RankTrainer.ComputingGrains…
#   - how long a rank computes on a GPU is not seen by the host: balance_test, balance_trainer_test
#   - a pipeline's times and memory are not measured on GPUs: SplitModelTest.Microbatches…, pipeline_cost_test
set(simulated_tests
  "arithmetic_check_test|CheckArithmetic.ChangesNoBit:CheckArithmetic.ComputesAgain*|own"
  "in_process_test|*"
  "c10d_cases_test|Sizes/*"
  "clipping_test|Sizes/*"
  "communication_hook_test|Sizes/*"
  "communication_test|Communication.*-*WithinAnEpoch*|own"
  "data_parallel_test|Sizes/*.*/2RanksMany:Sizes/*.*/3RanksOne:Sizes/*.*/2RanksAfterwards"
  "elastic_steps_test|*AreWholeWheneverARankIsGone"
  "dropout_test|Sizes/*-*DropoutTraining*:*ARanksGenerator*"
  "evaluate_test|Evaluate.CountsEverySample*|shared"
  "foreign_programs_test|Sizes/*"
  "fit_test|Sizes/*:Fit.Tokens*|shared"
  "full_sharding_test|Sizes/*.Trains*/2Ranks:Sizes/*.AddsUp*/3Ranks"
  "gpt_test|Sizes/*.EveryMesh*/2Ranks:Sizes/*.EveryStage*/3Ranks:GptOnText.Learns*:GptOnText.GoesOn*|shared"
  "grain_test|*|shared"
  "grains_test|Seeds/*/0|own"
  "half_precision_hook_test|Sizes/*"
  "local_sgd_test|Sizes/*"
  "mesh_test|*-Groups.*"
  "on_nan_test|OnNan*"
  "functional_test|Sizes/*:FunctionalTest.*"
  "parallel_layers_test|Sizes/*-*Convolutions*"
  "parallel_transformer_test|Sizes/*/2Ranks"
  "parameter_server_test|Sizes/*-*SparsePushes*"
  "pipeline_test|Sizes/*.RandomNets*/2Ranks1F1B:Sizes/*.RandomNets*/2RanksInterleaved2:Sizes/*.RandomNets*/3RanksGPipe"
  "power_sgd_test|Sizes/*"
  "reducer_test|Reducer.*-*Exception*:*ChannelsLast*:*NoRankUses*:*GrowsAfter*"
  "rank_trainer_test|RankTrainer.*-*ARecordedExchange*:*RecordedStepsGive*:*RunningStatistics*:*WeightsThatDiffer*:*ComputingGrains*:*OfTwoRanks*|shared"
  "resume_test|Resume.WithTheOptimizersState:Resume.WhatDraws*|shared"
  "shard_test|Sizes/*.RandomNets*/2Ranks"
  "sharded_optimizer_test|Sizes/*.Updates*/2Ranks:Sizes/*.Accumulates*/3Ranks"
  "split_grains_test|*-*NoMeshOfDataAndPipeline*:*SharedGenerator*:Seeds/*"
  "split_model_test|*-*MicrobatchesNeed*:*AMeanOverSome*:*SyncBatchNorms*"
  "split_optimizer_state_test|*|shared"
  "split_trainer_test|SplitTrainer.TrainsTheSameBits*|own"
  "storeys_test|*|shared"
  "straggler_test|SlowRank.*|own"
  "sync_batch_norm_test|Sizes/*.Layer*/2Ranks:Sizes/*.Nets*/2Ranks:SyncBatchNorm.*-*Conversion*:*GivesItsBackward*:*SaysWhat*"
  "weights_test|CheckpointTest.AShardedNetsOptimizerGoesOn*|shared"
  "trainer_test|Trainer.Evaluates*:Trainer.ARequest*|own")

file(REMOVE_RECURSE ${CMAKE_CURRENT_BINARY_DIR}/simulated)  # lists of groups that there were

# A program runs all of its files in one process: starting it, and loading LibTorch, takes a second each time. Those of
# the core's rooms run in CI each time, and the wings' in turns.
set(ways own shared)
set(not_own */3Ranks*:*Worlds.*/2)
set(not_shared */1Ranks*:*/4Ranks*:*Worlds.*/0:*Worlds.*/3)
if(with_simulated_device)
  set(devices_own cuda:0,cuda:1,cuda:2,cuda:3)
  set(devices_shared cuda:0,cuda:0,cuda:1)
  set(gpu_environment "${test_environment}" "LD_PRELOAD=$<TARGET_FILE:simulated_device>")
  set(gpu_properties LABELS simulated FAIL_REGULAR_EXPRESSION "SKIPPED: no such devices")
else()
  set(devices_own cuda)
  set(devices_shared cuda:0)
  set(gpu_environment "${test_environment}")
  set(gpu_properties LABELS gpu SKIP_REGULAR_EXPRESSION "SKIPPED: no such devices")
endif()
set(groups)
foreach(entry ${simulated_tests})
  string(REGEX MATCH "^([^|]*)[|]([^|]*)[|]?(.*)$" parts "${entry}")
  set(file ${CMAKE_MATCH_1})
  set(filter ${CMAKE_MATCH_2})
  set(ways_of_file ${CMAKE_MATCH_3})
  if(NOT ways_of_file)
    set(ways_of_file ${ways})
  endif()
  set(group ${${file}_program})
  if(NOT ${file}_is_core)
    string(PREPEND group wings_)
  endif()
  set(${group}_program ${${file}_program})
  list(APPEND groups ${group})
  set(separator "-")
  if(filter MATCHES "-.*")
    set(separator ":")
  endif()
  set(${file}_left_out "${CMAKE_MATCH_0}${separator}")
  foreach(way ${ways_of_file})
    string(APPEND ${group}_${way} "${file}.cpp|${filter}${separator}${not_${way}}\n")
  endforeach()
endforeach()
list(REMOVE_DUPLICATES groups)

foreach(group ${groups})
  foreach(way ${ways})
    set(list ${CMAKE_CURRENT_BINARY_DIR}/simulated/${group}_${way}.txt)
    file(CONFIGURE OUTPUT ${list} CONTENT "${${group}_${way}}")
    set(name ${group}_on_${way}_gpus)
    add_test(NAME ${name} COMMAND $<TARGET_FILE:${${group}_program}> --tests ${list})
    set_tests_properties(${name} PROPERTIES TIMEOUT ${seconds_per_test} COST 90 ${gpu_properties}
      ENVIRONMENT "${gpu_environment};LOCKSTEP_TEST_DEVICES=${devices_${way}}")
    if(group MATCHES "^wings_")
      set_property(TEST ${name} APPEND PROPERTY LABELS repeated)
    else()
      set_property(TEST ${name} APPEND PROPERTY LABELS thorough)
    endif()
  endforeach()
endforeach()

# What benchmarks/gpu_report runs over NCCL, in threads that share a GPU. Left out are tests of lockstep's own exchange,
# two sends that meet, for which NCCL would wait for ever, and many nets in one run, since a GPU has 32 streams for all.
foreach(group ${groups})
  string(REGEX REPLACE "(in_process|parameter_server|split_model)_test.cpp[^\n]*\n" "" list "${${group}_shared}")
  string(REPLACE "|*-Groups.*" "|*-Groups.*:*GroupsCallFor*" list "${list}")
  string(REPLACE "${not_shared}" "*/1Ranks*:*Worlds.*/0:*APlainHook*/4Ranks" list "${list}")
  file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/simulated/${group}_over_nccl.txt CONTENT "${list}")
endforeach()

# What benchmarks/gpu_report runs in 2, 3 and 4 processes that share a GPU over NCCL: tests that run in processes of one
# rank each on CPUs too. Left out are these sends, lockstep's own exchange, and tests whose bodies make tensors on the CPU.
set(not_in_processes "*ResidualBlocksCompute*:*DropoutIsTheSame*:*LibTorchsDropouts*:*StateOfEachRank*:*GroupsCallFor*")
set(in_processes ${tests_2x2} ${tests_3x3} ${tests_4x4})
list(REMOVE_DUPLICATES in_processes)
foreach(ranks 2 3 4)
  set(programs)
  foreach(file ${in_processes})
    if(DEFINED ${file}_left_out AND NOT file MATCHES "^(in_process|parameter_server)_test$")
      list(APPEND programs ${${file}_program})
      string(APPEND ${${file}_program}_in_${ranks}
        "${file}.cpp|Sizes/*Worlds.*/${ranks}Ranks*${${file}_left_out}${not_in_processes}\n")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES programs)
  foreach(program ${programs})
    file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/simulated/${program}_in_${ranks}_processes.txt
      CONTENT "${${program}_in_${ranks}}")
  endforeach()
endforeach()
if(NOT with_simulated_device)
  return()
endif()

foreach(name batches_ahead_test simulated_device_test cost_test planted_mistakes_test rules_test schemes_test
    wait_clock_test)
  set_property(TEST ${name} PROPERTY ENVIRONMENT "${gpu_environment}")
endforeach()
# Some of them with delays: data, ZeRO 3, pipeline, mesh. All of them take minutes (docs/results).
add_test(NAME schemes_test_with_delays
  COMMAND ${schemes_test_command} --gtest_filter=All/Schemes.*/0:All/Schemes.*/7:All/Schemes.*/10:All/Schemes.*/11)
set_tests_properties(schemes_test_with_delays PROPERTIES TIMEOUT ${seconds_per_test} LABELS "simulated;repeated"
  ENVIRONMENT "${gpu_environment};SIMULATED_DELAY_US=100")
# Over NCCL's stand-in, also ranks that share a GPU: grains, SyncBatchNorm, ZeRO 3, pipeline, mesh.
add_test(NAME schemes_test_over_nccl COMMAND $<TARGET_FILE:gpu_tests> --only schemes_test.cpp
  --gtest_filter=All/Schemes.*/3:All/Schemes.*/4:All/Schemes.*/7:All/Schemes.*/10:All/Schemes.*/12)
set_tests_properties(schemes_test_over_nccl PROPERTIES TIMEOUT ${seconds_per_test} LABELS "simulated;repeated"
  ENVIRONMENT "${test_environment};NCCL_MULTI_RANK_GPU_ENABLE=1")
# A rank is lost at each of its calls over NCCL's stand-in.
add_test(NAME elastic_steps_test_over_nccl COMMAND $<TARGET_FILE:gpu_tests> --only elastic_steps_test.cpp
  --gtest_filter=*AreWholeWheneverARankIsGone)
set_tests_properties(elastic_steps_test_over_nccl PROPERTIES TIMEOUT ${seconds_per_test} LABELS "simulated;repeated"
  ENVIRONMENT "${test_environment};LOCKSTEP_TEST_DEVICES=cuda:0,cuda:1")
add_test(NAME c10d_cases_test_over_nccl COMMAND $<TARGET_FILE:gpu_tests> --only c10d_cases_test.cpp
  --gtest_filter=*/2Ranks:*/3Ranks:C10dRefused.*)
set_tests_properties(c10d_cases_test_over_nccl PROPERTIES TIMEOUT ${seconds_per_test} LABELS simulated
  ENVIRONMENT "${test_environment};LOCKSTEP_TEST_DEVICES=cuda:0,cuda:1,cuda:2")
if(TARGET lockstep_on_simulated_gpus)
  add_dependencies(simulated_tests lockstep_on_simulated_gpus)
  set_property(TEST simulated_program_test PROPERTY ENVIRONMENT
    "${gpu_environment}" "LOCKSTEP_PROGRAM=$<TARGET_FILE:lockstep_on_simulated_gpus>")
  if(TEST elastic_on_gpus_test)
    add_dependencies(program_tests lockstep_on_simulated_gpus)
    set_property(TEST elastic_on_gpus_test PROPERTY ENVIRONMENT
      "${test_environment}" "LOCKSTEP_PROGRAM=$<TARGET_FILE:lockstep_on_simulated_gpus>")
  endif()
endif()
if(TARGET lockstep_program)
  add_dependencies(simulated_tests lockstep_program)
  set_property(TEST cli_on_gpus_test APPEND PROPERTY ENVIRONMENT "LOCKSTEP_SIMULATED_DEVICE=$<TARGET_FILE:simulated_device>")
endif()

# The same code on devices of another type, Intel's: some schemes, in one process.
set(list ${CMAKE_CURRENT_BINARY_DIR}/simulated/xpu.txt)
file(CONFIGURE OUTPUT ${list} CONTENT "data_parallel_test.cpp|Sizes/*.*/2RanksMany
communication_hook_test.cpp|Sizes/*/2Ranks
dropout_test.cpp|Sizes/*/2Ranks-*DropoutTraining*:*ARanksGenerator*
half_precision_hook_test.cpp|Sizes/*/2Ranks
pipeline_test.cpp|Sizes/*.RandomNets*/2Ranks1F1B
sharded_optimizer_test.cpp|Sizes/*.Updates*/2Ranks
sync_batch_norm_test.cpp|Sizes/*.Layer*/2Ranks
")
add_test(NAME concurrency_tests_on_xpu COMMAND $<TARGET_FILE:concurrency_tests> --tests ${list})
set_tests_properties(concurrency_tests_on_xpu PROPERTIES TIMEOUT ${seconds_per_test} LABELS simulated
  ENVIRONMENT "${test_environment};LD_PRELOAD=$<TARGET_FILE:simulated_xpu>;LOCKSTEP_TEST_DEVICES=xpu:0,xpu:1")
